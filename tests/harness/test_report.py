"""`retire report`, on results that are made up."""

from __future__ import annotations

import copy
import fnmatch
import json
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import overhead, retirement
from harness.inheritance import Inheritance
from harness.report import command, paper
from harness.report.figures import FIGURES
from harness.report.markdown import escaped, markdown
from harness.report.numbers import MS, PERCENT, RATIO, SHARE, TOKENS, shown, unit_of
from harness.report.page import page
from harness.report.results import number, read
from harness.report.sections import TOO_FEW, Standing, report
from harness.report.svg import Scale, linear, logarithmic
from harness.statistics import Bootstrap, Interval
from retire import cli
from tests.harness.made_up import cell, document, figure, results, write

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>&amp;'`|[a](javascript:b)\n# c"
VOID_ELEMENTS = {"meta", "link", "img", "br", "hr", "input"}


class Parsed(HTMLParser):
    """A page's elements, whether they nest, and its text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.stack, self.words, self._rows = [], [], [], []
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID_ELEMENTS:
            self.stack.append(tag)
        if tag == "tr":
            self._rows.append([])
        if tag in {"th", "td"}:
            self._rows[-1].append([])

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] != "style":
            self.words.append(data)
        if {"th", "td"} & set(self.stack):
            self._rows[-1][-1].append(data)

    @property
    def rows(self):
        """Of tables: the text of each cell."""
        return [tuple(" ".join(" ".join(cell).split()) for cell in row) for row in self._rows]

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def named(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


def told(tmp_path, documents=None):
    """The report, its page and its Markdown."""
    found = report(read(write(tmp_path, documents)))
    return found, page(found), markdown(found)


def rows_of(found, bench):
    (section,) = (section for section in found.sections if section.bench == bench)
    return {row.name: row for row in section.rows}


def only(tmp_path, told_, bench="one"):
    found, _, _ = told(tmp_path, {bench: told_})
    return found.sections[0]


# ---------------------------------------------------------------- figures


def test_every_figure_of_every_bench_is_drawn_with_its_numbers_and_words_for_who_cannot_see_it(tmp_path):
    found, text, _ = told(tmp_path)
    drawings = [drawing for section in found.sections for drawing in section.drawings]
    assert len(drawings) == sum(map(len, FIGURES.values()))
    for drawing in drawings:
        assert drawing.title
        assert drawing.caption
        assert drawing.panels
        assert drawing.rows
        assert {len(row) for row in drawing.rows} == {len(drawing.head)}
        for panel in drawing.panels:
            root = ET.fromstring(panel)
            assert root.get("role") == "img"
            assert len(root.get("aria-label")) > 20
            places = [float(one.get(name)) for one in root.iter() for name in ("x", "cx", "x1", "x2") if one.get(name)]
            width = float(root.get("viewBox").split()[2])
            assert all(-1 <= place <= width + 1 for place in places)
    parsed = Parsed(text)
    assert len(parsed.named("figure")) == len(drawings)
    for attrs in parsed.named("svg"):
        assert attrs.get("aria-label") or attrs.get("aria-hidden") == "true"


def test_churn_shows_medians_and_ranges_of_pairs_beside_the_papers(tmp_path):
    arms = {
        "native_prefix": {"recovery_ms": [900.0, 1000.0, 400.0], "reused_tokens": [640.0] * 3},
        "hbm": {"recovery_ms": [100.0, 200.0, 100.0], "reused_tokens": [7168.0] * 3},
        "dram": {"recovery_ms": [300.0, 200.0, 100.0], "reused_tokens": [7168.0] * 3},
    }
    section = only(tmp_path, document("churn", {}, [cell("churn", arms, share=1.0)]))
    (drawing,) = section.drawings
    assert drawing.rows == [
        ["1×", "5.00×", "6.51×", "4.00×", "3.84×", "640 tokens", "0 tokens", "900 ms", "100 ms", "200 ms"]
    ]


def test_the_certified_successors_bar_is_cut_by_stage_and_reclaim_is_not_in_it(tmp_path):
    ends = {"ttft": 100.0, "fence": 10.0, "align": 15.0, "resume": 20.0, "reclaim": 90.0, "first_frame": 80.0}
    certified = {f"{stage}_ms": [at, at] for stage, at in ends.items()}
    arms = {"cold": {"ttft_ms": [4000.0, 4000.0]}, "certified": certified}
    section = only(tmp_path, document("inheritance", {}, [cell("inheritance", arms)]))
    (drawing,) = section.drawings
    assert [row[:2] for row in drawing.rows[2:]] == [
        ("certified: fence", "10.0 ms"),
        ("certified: align", "5.00 ms"),
        ("certified: resume", "5.00 ms"),
        ("certified: to the first frame", "60.0 ms"),
        ("certified: on its way to the client", "20.0 ms"),
    ]
    assert len(drawing.panels) == 2, "the short bar is shown closer"


def test_the_grid_marks_what_is_slower_beyond_chance_and_leaves_holes_where_nothing_was_measured(tmp_path):
    def one(share, overlap, ratio, p):
        return {"step": 2, "share": share, "overlap": overlap, "ratio": ratio, "pairs": 12, "p_holm_above_1_02": p}

    ratios = [one(0.1, 0.0, 1.2, 0.001), one(0.1, 0.5, 1.2, 0.2), one(0.4, 0.0, 0.8, 1.0)]
    section = only(tmp_path, document("composition", {"ratios": ratios}, []))
    (drawing,) = section.drawings
    (panel,) = drawing.panels
    assert panel.count("✕") == panel.count('class="marked"') == 1
    assert panel.count('class="field empty"') == 1
    assert [row[-1] for row in drawing.rows] == ["yes", "no", "no"]


def test_the_burst_timeline_is_the_trial_of_median_goodput_and_ends_with_the_window(tmp_path):
    live = [[[0.0, 1, 0], [5.0, 1, n], [130.0, 1, 99]] for n in (1, 2, 3)]
    arms = {"native": {"goodput_tokens_per_s": [3.0, 9.0, 5.0], "live": live}}
    section = only(tmp_path, document("burst", {}, [cell("burst", arms, window_s=120, bursts_s=[5.0, 400.0])]))
    (drawing,) = section.drawings
    assert drawing.rows == [("native", "5.00 token/s", "none", "none", "none", "3")]
    assert drawing.panels[0].count('class="burst"') == 1


def test_the_rate_map_marks_the_best_policy_of_every_rate(tmp_path):
    def at(rate, one, other):
        arms = {"one": {"goodput_tokens_per_s": [one]}, "other": {"goodput_tokens_per_s": [other]}}
        return cell("rates", arms, revisions_per_scope_per_s=rate, concurrency=4)

    section = only(tmp_path, document("rates", {}, [at(0, 2.0, 1.0), at(0.2, 1.0, 3.0)]))
    (drawing,) = section.drawings
    assert drawing.panels[0].count('class="marked"') == 2
    assert drawing.rows == [("4", "0", "2.00 token/s", "1.00 token/s"), ("4", "0.2", "1.00 token/s", "3.00 token/s")]


@pytest.mark.parametrize("bench", FIGURES)
def test_without_cells_and_figures_a_bench_has_its_rows_and_no_figure(bench, tmp_path):
    found, text, _ = told(tmp_path, {bench: document(bench, {}, [])})
    assert found.sections[0].drawings == []
    assert all(row.here == "none" for row in found.sections[0].rows)
    Parsed(text)


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("low", "high", "standing"),
    [(34.0, 40.0, Standing.REACHED), (30.0, 36.0, Standing.OPEN), (20.0, 33.9, Standing.NOT_REACHED)],
)
def test_an_interval_decides_where_no_verdict_was_recorded(low, high, standing, tmp_path):
    section = only(tmp_path, document("inheritance", figure("speedup", 33.0, low, high), []))
    row = section.rows[0]
    assert row.standing is standing
    assert (row.aim, row.paper, row.here) == ("≥ 34×", "33.8×", "33.0×")
    assert row.interval == f"[{low:.1f}, {high:.1f}]×"


def test_a_recorded_verdict_stands_and_an_aim_of_another_day_is_shown_as_it_was(tmp_path):
    recorded = {"key": "speedup", "paper": "33.8×", "aim": "≥ 99", "verdict": "not reached"}
    section = only(tmp_path, document("inheritance", figure("speedup", 50.0, 49.0, 51.0), [], targets=[recorded]))
    assert (section.rows[0].aim, section.rows[0].standing) == ("≥ 99", Standing.NOT_REACHED)
    recorded["aim"] = "≥ 34"
    section = only(tmp_path, document("inheritance", figure("speedup", 50.0, 49.0, 51.0), [], targets=[recorded]))
    assert section.rows[0].aim == "≥ 34×"


def test_what_a_run_with_a_failed_check_measured_does_not_count(tmp_path):
    for number_, checks in enumerate(({"equal": False, "rest": True}, {})):
        summary = figure("speedup", 50.0, 49.0, 51.0)
        section = only(tmp_path, document("inheritance", summary, [], checks=checks))
        assert section.rows[0].standing is Standing.VOID, number_
    found, text, told_ = told(tmp_path, {"one": document("inheritance", summary, [], checks={"all_equal": False})})
    assert not found.counts()[Standing.REACHED]
    assert "Failed: all equal." in Parsed(text).text
    assert "Does not count" in told_


def test_a_figure_that_is_missing_has_not_reached_its_aim(tmp_path):
    section = only(tmp_path, document("inheritance", {"speedup": None, "speedup_ci95": None}, []))
    assert section.rows[0].standing is Standing.NOT_REACHED
    assert section.rows[0].here == "none"


def test_shortfalls_come_first_and_quick_runs_are_counted_apart(tmp_path):
    found, text, told_ = told(tmp_path)
    order = [row.standing for _, row in found.shortfalls()]
    assert order == sorted(order, key=list(Standing).index)
    assert set(order) == {Standing.NOT_REACHED, Standing.VOID, Standing.OPEN}
    counts = found.counts()
    quick = sum(count.quick for count in counts.values())
    assert quick == sum(row.standing is not None for row in rows_of(found, "overhead").values()) > 0
    assert counts[Standing.OPEN].full == order.count(Standing.OPEN) - counts[Standing.OPEN].quick
    shown_ = Parsed(text).text
    first = shown_.index("What falls short")
    assert first < shown_.index("Obsolete output Table 4")
    reached = counts[Standing.REACHED]
    assert f"{reached.full} reached and {reached.quick} on quick runs" in shown_
    assert f"{reached.full} reached (and {reached.quick} on quick runs)" in told_
    assert told_.index("## Shortfalls first") < told_.index("## Obsolete output")


def test_one_pair_has_no_interval(tmp_path):
    section = only(tmp_path, document("inheritance", figure("speedup", 40.0, 40.0, 40.0), []))
    assert section.rows[0].interval == TOO_FEW
    assert section.rows[0].spread is None


def test_a_median_may_be_aimed_at_and_the_interval_bounded(tmp_path):
    for percents in ([0.4] * 9, [0.4] * 6 + [2.0] * 3, [0.6] * 9, [0.1] * 4 + [0.9] * 5):
        for cell_ in overhead.PAPER:
            found = Bootstrap(overhead.percent_more, [(100 + one, 100) for one in percents])
            interval = found.interval()
            summary = figure(f"{cell_}_overhead_pct", found.value, interval.low, interval.high)
            section = only(tmp_path, document("overhead", summary, []))
            (row,) = (one for one in section.rows if one.here != "none")
            assert overhead.verdict(cell_, found).value.startswith(row.standing.value)


def test_what_benches_say_of_their_targets_is_what_is_judged_without_them(tmp_path):
    trial = {arm: {"ttft_ms": ms} for arm, ms in (("cold", 4000.0), ("certified", 105.0), ("native_full_hit", 104.0))}
    session = SimpleNamespace(checks={"equal": True}, seal={})
    inherited = Inheritance(offsets=(4,))._result(session, {4: [trial, trial]}, 2)
    arm = retirement.Arm(3000.0, 4000.0, step_ms=6000.0)
    ours = retirement.Arm(90.0, 1000.0, longest_interval_ms=80.0)
    planned = dict.fromkeys([*retirement.PATHS, *retirement.TAILS], 2)
    trials = {path.name: [retirement.Trial(arm, ours)] * 2 for path in planned}
    retired = retirement._result(trials, {"equal": True}, {}, planned)
    for bench, result in (("inheritance", inherited), ("retirement", retired)):
        manifest = {"bench": bench, "quick": False, "date": "2026-11-30T12:00:00+00:00"}
        with_targets = result.document(manifest)
        without = {key: value for key, value in with_targets.items() if key != "targets"}
        said, judged = (only(tmp_path, json.loads(json.dumps(one))) for one in (with_targets, without))
        assert [row.standing for row in said.rows] == [row.standing for row in judged.rows]
        assert [row.aim for row in said.rows] == [row.aim for row in judged.rows]
        assert {target.key for target in result.targets} <= {claim.key for claim in _chapter(bench).claims}


def _chapter(bench):
    return next(chapter for chapter in paper.CHAPTERS if chapter.bench == bench)


def test_what_is_not_measured_is_said_with_the_papers_values(tmp_path):
    found, text, told_ = told(tmp_path, {"churn": results()["churn"]})
    assert [one.chapter.bench for one in found.missing] == [
        chapter.bench for chapter in paper.CHAPTERS if chapter.bench != "churn"
    ]
    assert found.counts()[Standing.MISSING].full > 20
    for shown_ in (Parsed(text).text, told_):
        assert "TP 2 × PP 2: Native boundary / fence" in shown_
        assert "6.04×" in shown_


# ---------------------------------------------------------------- what files say


def test_a_bench_that_nobody_knows_is_shown_as_it_says(tmp_path):
    target = {"key": "lost_pages", "paper": "3", "aim": "0", "verdict": "reached"}
    summary = {"lost_pages": 0, "took_s": 2.5, "by_tier": {"hbm": {"speedup": 3.25}}, "list": [1, 2], "rows": [{}, {}]}
    section = only(tmp_path, document("soak_test", summary, [], targets=[target]))
    assert (section.title, section.place) == ("soak test", "–")
    assert [(row.label, row.here, row.standing) for row in section.rows] == [
        ("lost pages", "0 pages", Standing.REACHED)
    ]
    assert section.rest == [
        ("took s", "2.50 s"),
        ("by tier/hbm/speedup", "3.25×"),
        ("list", "1, 2"),
        ("rows", "2 entries"),
    ]


def test_a_replay_has_a_chapter_of_its_own_with_the_papers_figures_and_no_aim(tmp_path):
    section = only(tmp_path, results()["replay"])
    assert (section.title, section.place) == ("Recorded interruptions, replayed", "Figure 6 and Table 9")
    assert [drawing.title for drawing in section.drawings] == ["Live executions while revisions come in bursts"]
    rows = {row.label: (row.here, row.paper, row.standing) for row in section.rows}
    assert rows["Final versions that spoke, native abort"] == ("11 versions", "3 of 9", None)
    assert {standing for *_, standing in rows.values()} == {None}, "whose trace it is nobody knows"


def test_the_selector_is_shown_cell_by_cell_with_its_interval_and_what_it_chose(tmp_path):
    section = only(tmp_path, results()["rates"])
    (drawing,) = (one for one in section.drawings if one.title == "The selector beside the better quantum")
    assert drawing.rows[2] == ("4", "0.2", "selective 512", "0.950×", "[0.930, 1.040]×", "98 tokens")
    assert len(drawing.rows) == 6
    assert (
        rows_of(SimpleNamespace(sections=[section]), "rates")[
            "Cells where the selector is within 2 % of the better quantum"
        ].standing
        is Standing.NOT_REACHED
    )


def test_of_several_results_the_newest_full_one_counts_and_the_others_are_named(tmp_path):
    first = document("churn", {"rounds": 1}, [], date="2026-11-30T10:00:00+01:00")
    later = document("churn", {"rounds": 2}, [], date="2026-11-30T11:30:00+00:00")
    quick = document("churn", {"rounds": 3}, [], date="2026-11-30T12:30:00+00:00", quick=True)
    undated = document("churn", {"rounds": 4}, [], date="yesterday")
    found, text, told_ = told(tmp_path, {"z": first, "a": later, "q": quick, "m": undated})
    assert found.sections[0].run.file == "a.json"
    assert sorted(found.passed_over) == ["m.json", "q.json", "z.json"]
    for shown_ in (Parsed(text).text, told_):
        assert "full run of churn, 2026-11-30 09:00 UTC: there is a newer one" in shown_
        assert "quick run of churn, 2026-11-30 12:30 UTC: there is a full one" in shown_
        assert "date unknown" in shown_


def test_quick_runs_are_shown_where_there_is_no_full_one(tmp_path):
    quick = [document("churn", {}, [], date=f"2026-11-30T12:0{n}:00+00:00", quick=True) for n in (0, 1)]
    found, *_ = told(tmp_path, {"first": quick[0], "second": quick[1]})
    assert found.sections[0].run.file == "second.json"


def test_files_that_hold_no_result_are_named_with_the_reason_and_stop_nothing(tmp_path):
    write(tmp_path, {"churn": results()["churn"]})
    (tmp_path / "broken.json").write_text('{"summary": ', encoding="utf-8")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    (tmp_path / "list.json").write_text("[1, 2]", encoding="utf-8")
    nested = '{"a":' * 900 + "1" + "}" * 900
    strange = '{"summary": NESTED, "checks": {}, "manifest": {"bench": "deep", "cpu": NESTED}}'.replace(
        "NESTED", nested
    )
    (tmp_path / "nested.json").write_text(strange, encoding="utf-8")
    (tmp_path / "other.json").write_text('{"summary": {}, "checks": {}, "manifest": {"bench": 3}}', encoding="utf-8")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "notes.txt").write_text("not looked at", encoding="utf-8")
    found, text, told_ = told(tmp_path, {})
    assert list(found.left_out) == [f"{n}.json" for n in ("broken", "bytes", "deep", "folder", "list", "other")]
    for file, why in found.left_out.items():
        assert f"{file} left out: {why}" in Parsed(text).text
        assert escaped(file) in told_
    assert "notes.txt" not in text
    assert str(tmp_path) not in text + told_


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), 10**400, 1e300, True, "3", None, [], {}], ids=str
)
def test_what_is_no_number_is_not_taken_for_one(value):
    assert number(value) is None


def test_numbers_too_small_to_draw_are_nothing():
    assert number(5e-324) == 0.0
    assert number(-1e-9) == -1e-9


def hostile(value):
    """The same shape with every text, and every name of ours, replaced."""
    if isinstance(value, dict):
        return {f"{key}{HOSTILE}" if key.startswith("own") else key: hostile(one) for key, one in value.items()}
    if isinstance(value, list):
        return [hostile(one) for one in value]
    return HOSTILE if isinstance(value, str) else value


def test_nothing_that_a_file_says_becomes_markup(tmp_path):
    documents = results()
    for bench in ("burst", "rates"):
        for one in documents[bench]["cells"]:
            one["arms"] = {f"{arm}{HOSTILE}": metrics for arm, metrics in one["arms"].items()}
    for bench, told_ in documents.items():
        told_["summary"][f"more{HOSTILE}"] = HOSTILE
        told_["summary"]["nested"] = {HOSTILE: {HOSTILE: [HOSTILE]}}
        told_["checks"] = {HOSTILE: True, f"{HOSTILE} not": False}
        told_["targets"] = [{"key": f"{bench}{HOSTILE}", "paper": HOSTILE, "aim": HOSTILE, "verdict": "not reached"}]
        told_["manifest"] = hostile(told_["manifest"]) | {"bench": bench, HOSTILE: HOSTILE}
    documents["strange"] = copy.deepcopy(documents["tenants"])
    documents["strange"]["manifest"]["bench"] = HOSTILE
    write(tmp_path, documents)
    (tmp_path / "<img src=x>.json").write_text(json.dumps(documents["strange"]), encoding="utf-8")
    found, text, told_ = told(tmp_path, documents)
    assert len([one for section in found.sections for one in section.drawings]) == sum(map(len, FIGURES.values()))
    parsed = Parsed(text)
    names = {name for name, _ in parsed.elements}
    assert not names & {"script", "img", "iframe", "object", "link", "base", "form"}
    for _, attrs in parsed.elements:
        assert not any(name.startswith("on") for name in attrs)
        assert attrs.get("href", "#").startswith("#")
        assert re.fullmatch(r"flex-grow:\d+", attrs.get("style") or "flex-grow:1")
    assert "<script>alert(1)</script>" in parsed.text, "it is shown, not run"
    assert not re.search(r"(?<!\\)<", told_)
    assert "](" not in told_
    lines = [line for line in told_.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in lines), "a row is one line"


def test_characters_that_cannot_be_written_or_that_reorder_others_are_marked(tmp_path):
    told_ = document("churn", {"said": "a\ud800b\u202ec\x00d"}, [], cpu="e\ufffff")
    _, text, in_markdown = told(tmp_path, {"one": told_})
    assert "a\ufffdb\ufffdc\ufffdd" in text
    for written in (text, in_markdown):
        assert "e\ufffdf" in written
        written.encode()


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(-(10**30), 10**30),
    st.text(max_size=5),
    st.lists(st.one_of(st.none(), st.floats(), st.text(max_size=3), st.lists(st.integers())), max_size=4),
    st.dictionaries(st.text(max_size=3), st.floats(), max_size=2),
)


def places(value, at=()):
    """Where something can be replaced."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at] * bool(at) + [found for key, one in inside for found in places(one, (*at, key))]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_stands_where_is_shown_or_left_out(data, tmp_path_factory):
    documents = results()
    bench = data.draw(st.sampled_from(sorted(documents)))
    document_ = documents[bench]
    for place in data.draw(st.lists(st.sampled_from(places(document_)), min_size=1, max_size=4)):
        *way, last = place
        inner = document_
        try:
            for key in way:
                inner = inner[key]
            inner[last] = data.draw(JUNK)
        except (TypeError, KeyError, IndexError):
            continue  # what stood there has just been replaced
    folder = tmp_path_factory.mktemp("junk")
    _, text, _ = told(folder, {bench: document_})
    for panel in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(panel)
        assert not re.search(r'="-?(nan|inf)', panel)
    Parsed(text)


# ---------------------------------------------------------------- page and Markdown


def test_page_and_markdown_say_the_same_numbers(tmp_path):
    found, text, told_ = told(tmp_path)
    on_page = Parsed(text).rows
    lines = [line for line in told_.splitlines() if line.startswith("|")]
    in_markdown = [
        tuple(re.sub(r"\\(.)", r"\1", value).strip() for value in re.split(r"(?<!\\)\|", line)[1:-1]) for line in lines
    ]
    for section in found.sections:
        quick = section.run.quick
        for row in section.rows:
            standing = row.standing or ""
            said = f"{standing} quick" if standing and quick else standing
            assert (row.label, row.here, said, row.interval, row.aim, row.paper) in on_page
            said = f"{standing}, quick" if standing and quick else standing
            assert (row.name, row.paper, row.aim, row.found, said) in in_markdown
        for drawing in section.drawings:
            for values in [drawing.head, *drawing.rows]:
                assert tuple(values) in on_page
                assert tuple(values) in in_markdown
    for one in found.missing:
        for row in one.rows:
            assert (row.name, row.paper, row.aim, one.chapter.place) in on_page
            assert (one.chapter.bench, row.name, row.paper, row.aim, one.chapter.place) in in_markdown


def test_page_and_markdown_have_every_manifest(tmp_path):
    _, text, told_ = told(tmp_path)
    for said in ("0123456789ab", "db65d160952203da", "smollm2", "0.32.0", "2.13.0", "A processor", "24 GiB"):
        assert said in told_
        assert said in text
    assert "0123456789abcdef" not in text, "the beginning of a commit names it"


def test_the_page_needs_nothing_but_itself(tmp_path):
    _, text, _ = told(tmp_path)
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#)|url\(|@import|@font-face|<script|<link", text)
    assert "http" not in text.replace("http-equiv", "")
    parsed = Parsed(text)
    (policy,) = [one for one in parsed.named("meta") if one.get("http-equiv") == "Content-Security-Policy"]
    assert policy["content"].startswith("default-src 'none'")
    ids = [attrs["id"] for _, attrs in parsed.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {attrs["href"][1:] for attrs in parsed.named("a")} <= set(ids)
    for words in ("prefers-color-scheme: dark", "@media print", "width=device-width", "prefers-reduced-motion"):
        assert words in text


def test_every_table_scrolls_inside_its_container(tmp_path):
    _, text, _ = told(tmp_path)
    parsed = Parsed(text)
    regions = [attrs for attrs in parsed.named("div") if attrs.get("class") == "scroll"]
    assert len(regions) == len(parsed.named("table"))
    assert all(attrs["tabindex"] == "0" and attrs["aria-label"] for attrs in regions)


def test_the_same_results_give_the_same_text(tmp_path):
    first = tmp_path / "one"
    second = tmp_path / "two"
    first.mkdir()
    second.mkdir()
    told_ = told(first)[1:]
    assert told(second, dict(reversed(results().items())))[1:] == told_


# ---------------------------------------------------------------- the command


def test_the_command_writes_the_page_into_the_folder_and_says_what_it_shows(tmp_path, capsys):
    write(tmp_path)
    assert command.main([str(tmp_path), "--markdown", str(tmp_path / "results.md")]) == 0
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert (tmp_path / "results.md").read_text(encoding="utf-8").startswith("# Results\n")
    said = capsys.readouterr()
    assert "not reached" in said.out
    assert said.err == ""


def test_without_a_result_nothing_is_written(tmp_path, capsys):
    (tmp_path / "x.json").write_text("{}", encoding="utf-8")
    assert command.main([str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "x.json is left out" in said
    assert "no result" in said
    assert not (tmp_path / "report.html").exists()


def test_a_place_that_cannot_be_written_is_said(tmp_path, capsys):
    write(tmp_path)
    assert command.main([str(tmp_path), "--out", str(tmp_path / "nowhere" / "x.html")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_a_folder_that_is_none_is_wrong_usage(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        command.main([str(tmp_path / "nowhere")])
    assert end.value.code == 2
    assert "is no folder" in capsys.readouterr().err


def test_the_command_line_hands_its_arguments_on(monkeypatch):
    given_ = []
    monkeypatch.setattr(command, "main", lambda rest: given_.append(rest) or 1)
    assert cli.main(["report", "results", "--out", "x.html"]) == 1
    assert given_ == [["results", "--out", "x.html"]]


def test_template_and_style_are_part_of_the_package():
    settings_ = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns = settings_["package-data"]["*"]
    others = [file.name for file in (ROOT / "harness" / "report").iterdir() if file.is_file() and file.suffix != ".py"]
    assert sorted(others) == ["page.css", "page.html"]
    assert all(any(fnmatch.fnmatch(name, pattern) for pattern in patterns) for name in others)


# ---------------------------------------------------------------- numbers and places


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        (MS, 0.29, "0.29 ms"),
        (MS, 13.609, "13.6 ms"),
        (MS, 864.01, "864 ms"),
        (MS, 5626.4, "5626 ms"),
        (MS, 21859.0, "21,859 ms"),
        (RATIO, 0.9754, "0.975×"),
        (PERCENT, -0.646, "−0.65 %"),
        (SHARE, 0.6761, "67.6 %"),
        (TOKENS, 0, "0 tokens"),
    ],
)
def test_a_number_has_three_digits_or_so_and_its_unit(unit, value, text):
    assert unit.text(value) == text


def test_an_interval_has_its_unit_once():
    assert MS.between(Interval(1.0, 20.0)) == "[1.00, 20.0] ms"


def test_a_name_tells_its_unit_and_what_is_counted_is_whole():
    assert shown(3.5, unit_of("advance_p99_ms")) == "3.50 ms"
    assert shown(4, unit_of("grid_cells_failing")) == "4 cells"
    assert shown(0.031, unit_of("kept_pages/different_bytes")) == "0.031"
    assert shown(1024, unit_of("quantum")) == "1024"
    assert len(shown("x" * 999, unit_of("said"))) < 200


def test_scales_put_their_ends_at_the_ends_and_few_ticks_between():
    for scale in (linear([3.0, 9.0], 0, 100), linear([5.0], 0, 100), linear([], 0, 100), linear([-1e15, 1e15], 0, 100)):
        assert (scale(scale.low), scale(scale.high)) == (0, 100)
        assert 2 <= len(scale.ticks) <= 12
        assert all(scale.low <= one <= scale.high or abs(one) < 1e-6 for one in scale.ticks)
    scale = logarithmic([3.0, 4000.0], 100, 0)
    assert scale.ticks == [1, 10, 100, 1000, 10000]
    assert scale(1e9) == 0
    assert Scale(1.0, 1.0, 0, 10)(1.0) == 5.0


def test_every_claim_stands_once_and_every_bench_of_the_paper_has_a_chapter():
    keys = [(chapter.bench, claim.key) for chapter in paper.CHAPTERS for claim in chapter.claims]
    assert len(keys) == len(set(keys))
    from harness.bench import EXPERIMENTS

    assert {experiment.name for experiment in EXPERIMENTS} <= {chapter.bench for chapter in paper.CHAPTERS}
    for experiment in EXPERIMENTS:
        assert _chapter(experiment.name).place == experiment.paper
