"""One sitting: a bench measured from its start, or from where an earlier sitting was interrupted, to its end.

Owns: what lies beside a result (the trials that led to it) and when a result counts as there already.
Must not know: any experiment, or the command line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.experiment import Experiment
from harness.journal import SUFFIX, Journal
from harness.ledger import Ledger
from harness.manifest import digest_of, identity, manifest
from harness.progress import Bar, note
from harness.session import served_at


class Refused(ValueError):
    """A bench cannot be run as it was asked for; the message is one line and says why."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """How a bench is to be run.

    `model`: another than its own.  `url`: of a running server that is measured instead of one of the bench's.
    `anew`: even if a result, or trials of one, are there.
    """

    quick: bool = False
    model: str | None = None
    url: str | None = None
    anew: bool = False

    def of(self, experiment: Experiment) -> tuple[Experiment, Mapping[str, Any]]:
        """The experiment set up so, and what a running server says it is.

        Raises:
            Refused: the bench brings its own server, or models.
            ServerUnsuitable: no server at `url` that can be measured.
        """
        fields = {field.name for field in dataclasses.fields(experiment)}
        if self.url and experiment.own_servers:
            raise Refused(f"{experiment.name} cannot measure a running server: {experiment.own_servers}")
        if self.model and "model" not in fields:
            raise Refused(f"{experiment.name} has models of its own")
        served = served_at(self.url, self.model) if self.url else {}
        model = served.get("model", self.model)
        changes = {**({"model": model} if model else {}), **({"url": self.url} if self.url else {})}
        return dataclasses.replace(experiment, **changes) if changes else experiment, served


def trials_beside(file: Path) -> Path:
    """Where the trials lie that lead to the result in `file`."""
    return file.with_name(file.name.removesuffix(".json") + SUFFIX)


def measured(experiment: Experiment, asked: Asked, file: Path | None = None) -> dict[str, Any]:
    """The document of a run, kept in `file` and with every trial beside it, if there is one.

    A run that came to its end is not repeated: what it has written is given back.

    Raises:
        Refused, ServerUnsuitable: see `Asked.of`.
        JournalInUse, OSError: of the files.
        Exception: whatever the experiment raises; every trial that is done stays done.
    """
    experiment, served = asked.of(experiment)
    about = identity(experiment, quick=asked.quick, served=served)
    with contextlib.ExitStack() as stack:
        bar = Bar(experiment.name)
        stack.callback(bar.close)
        if file is None:
            result = experiment.run(Ledger(show=bar.show), quick=asked.quick)
            return result.document(manifest(experiment.name, result, quick=asked.quick))
        journal = stack.enter_context(Journal(trials_beside(file), about, anew=asked.anew))
        if journal.finished and (document := _written(file, digest_of(about))) is not None:
            note(f"{file} holds this very measurement, of {document['manifest']['date']}; --anew makes another")
            return document
        journal.begin()
        ledger = Ledger(journal.earlier, journal.write, bar.show)
        if ledger.earlier_trials:
            note(f"going on after {ledger.earlier_trials} trials that are done")
        result = experiment.run(ledger, quick=asked.quick)
        document = result.document(
            manifest(experiment.name, result, quick=asked.quick, sittings=journal.sittings, identity=digest_of(about))
        )
        _write(file, document)
        journal.finish()
    return document


def _written(file: Path, identity: str) -> dict[str, Any] | None:
    """The document in `file`, if it is of that identity."""
    try:
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return document if document["manifest"]["identity"] == identity else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, document: Mapping[str, Any]) -> None:
    """All of it or nothing."""
    file = file.resolve()  # what a link points to is written, not the link
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("w", encoding="utf-8") as out:
        out.write(json.dumps(document, indent=2) + "\n")
        out.flush()
        os.fsync(out.fileno())
    partial.replace(file)
