"""
The report of an audit on a terminal: the result first, then the numbers.

It fits 80 columns and uses up to 118. Colours are for terminals only. Text that came out of an
event is spelt out, so that it cannot control the terminal.
"""

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.text import Text

from oncebridge.audit import text as report_text
from oncebridge.audit.report import (
    AuditReport,
    CauseFound,
    Difference,
    NamedCounts,
    RulesComparison,
)
from oncebridge.audit.suggest import Suggestion
from oncebridge.base import formatting
from oncebridge.engine.causes import MEANINGS
from oncebridge.engine.verdict import Verdict
from oncebridge.events.event import REASONS

_WIDEST: Final = 118
_BAR: Final = 24
_ROWS: Final = 8
_DIFFERENCES: Final = 20
_GLUE: Final = "\ue000"  # a space at which no line is broken
STYLES: Final = {
    Verdict.DELIVERED: "green",
    Verdict.DUPLICATE: "yellow",
    Verdict.STALE: "cyan",
    Verdict.UNCHANGED: "cyan",
    Verdict.CONFLICT: "magenta",
    Verdict.DEAD: "red",
}


def show(report: AuditReport, suggestion: Suggestion, console: Console) -> None:
    """Print the whole report on *console*."""
    _ReportPrinter(report, console).show(suggestion)


def console_for_reports() -> Console:
    """Return a console that uses colours on a terminal only, and is at most 118 columns wide."""
    console = Console(highlight=False, markup=False, emoji=False)
    width = min(console.width, _WIDEST) if console.is_terminal else 100
    return Console(highlight=False, markup=False, emoji=False, width=width)


class _ReportPrinter:
    """Prints the sections of a report."""

    def __init__(self, report: AuditReport, console: Console) -> None:
        self._report = report
        self._console = console

    def show(self, suggestion: Suggestion) -> None:
        report = self._report
        self._print(
            Text("oncebridge audit", "bold").append(
                f"  {report_text.recording_summary(report)}", "dim"
            )
        )
        self._print()
        self._print(Text(report_text.headline(report), "bold"))
        if report.events:
            self._verdicts()
            self._causes()
            self._gaps()
            self._noisiest()
            self._naive()
            self._suspicions()
        self._unreadable()
        if report.trial is not None:
            self._trial(report.trial)
        if report.events:
            self._suggestion(suggestion)

    # --- sections -----------------------------------------------------------------------

    def _verdicts(self) -> None:
        others = {
            verdict: count
            for verdict, count in self._report.verdicts.items()
            if count and verdict not in (Verdict.DELIVERED, Verdict.DUPLICATE)
        }
        if others:
            listed = ", ".join(f"{count:,} {verdict.value}" for verdict, count in others.items())
            self._print(Text(f"Including {listed}.", "dim"))
        if note := report_text.clock_note(self._report):
            self._print(Text(note, "dim"))

    def _causes(self) -> None:
        if not self._report.causes:
            return
        self._head("Duplicates by cause")
        whole = report_text.count_duplicates(self._report)
        for found in self._report.causes:
            self._cause(found, whole)

    def _cause(self, found: CauseFound, whole: int) -> None:
        line = Text(f"{found.cause.value:<19}", "bold yellow")
        line.append(f"{found.count:>9,}  {formatting.format_share(found.count, whole):>5}  ")
        line.append_text(_bar(found.count, whole))
        self._print(line, indent=2)
        meaning = MEANINGS[found.cause]
        if found.gaps is not None:
            meaning += f"; {report_text.gap_summary(found.gaps)}"
        self._print(Text(meaning), indent=4)
        if found.examples:
            self._print(
                Text(f"for example {report_text.example_text(found.examples[0])}", "dim"), indent=4
            )

    def _gaps(self) -> None:
        gaps = self._report.gaps
        if gaps is None:
            return
        self._head("Time since the first arrival")
        rows = report_text.buckets(gaps)
        most = max((number for _, number in rows), default=0)
        for name, number in rows:
            line = Text(
                f"{name:<19}{number:>9,}  {formatting.format_share(number, gaps.count):>5}  "
            )
            self._print(line.append_text(_bar(number, most, style="blue")), indent=2)
        self._print(Text(report_text.gap_sentence(gaps)), indent=2)
        for sentence in report_text.window_sentences(self._report):
            self._print(Text(sentence), indent=2)

    def _noisiest(self) -> None:
        report = self._report
        for title, what, tallies in (
            ("Topics with most duplicates", "topic", report.topics),
            ("Entities with most duplicates", "entity", report.entities),
            ("Sources", "source", report.sources),
            ("Rules", "rule", report.rules),
        ):
            if tallies:
                self._head(title)
                self._tallies(what, tallies)

    def _tallies(self, what: str, tallies: Sequence[NamedCounts]) -> None:
        rows = [(what, "arrivals", "duplicates", "")]
        rows += [
            (
                tally.name or "(none)",
                f"{tally.arrivals:,}",
                f"{tally.repeats:,}",
                formatting.format_share(tally.repeats, tally.arrivals),
            )
            for tally in tallies[:_ROWS]
        ]
        room = self._console.width - 2 - 2 * 11 - 8
        widest = max(len(formatting.shorten(name, room)) for name, *_ in rows)
        for at, (name, *numbers) in enumerate(rows):
            shown = f"{formatting.shorten(name, room):<{widest}}"
            arrivals, repeated, part = numbers
            line = f"{shown}{arrivals:>11}{repeated:>11}{part:>8}"
            self._print(Text(line, "" if at else "dim"), indent=2)

    def _naive(self) -> None:
        if not self._report.naive:
            return
        self._head("What a simple key would have done with this recording")
        for key in self._report.naive:
            line = Text(f"{formatting.printable(key.title)}: ", "bold")
            line.append(report_text.naive_outcome(key), "red" if key.lost else "")
            if (key.lost or key.let_through) and key.examples:
                line.append(f" (for example {formatting.printable(key.examples[0].place)})", "dim")
            self._print(line, indent=2)

    def _suspicions(self) -> None:
        if not self._report.suspicions:
            return
        self._head("Needs review")
        for found in self._report.suspicions:
            title, meaning = report_text.suspicion_text(found)
            line = Text(f"{title} ", "bold magenta").append(f"{found.count:,}", "bold")
            self._print(line.append(f"  {meaning}"), indent=2)
            places = [report_text.example_text(one) for one in found.examples[:2]]
            if places:
                self._print(Text(f"for example {'; '.join(places)}", "dim"), indent=4)

    def _unreadable(self) -> None:
        report = self._report
        if not report.unreadable:
            return
        self._head(
            f"Unreadable: {formatting.format_count(sum(report.unreadable.values()), 'record')}"
        )
        for reason, count in report.unreadable.items():
            line = Text(f"{count:,} ").append(formatting.printable(reason), "red")
            self._print(line.append(f"  {REASONS.get(reason, '')}"), indent=2)
        places = [formatting.printable(place) for place in report.unreadable_places]
        if places:
            self._print(Text(f"at {formatting.format_list(places)}", "dim"), indent=2)

    def _trial(self, trial: RulesComparison) -> None:
        self._head("Candidate rules")
        for sentence in report_text.comparison_sentences(trial):
            self._print(Text(sentence), indent=2)
        for before, after, count in trial.by_change:
            line = Text(f"{count:>9,}  ").append_text(_change(before, after))
            self._print(line, indent=2)
        shown = trial.differences[:_DIFFERENCES]
        for one in shown:
            self._difference(one)
        if trial.changed > len(shown):
            more = f"and {trial.changed - len(shown):,} more; write all of them with --differences FILE"
            self._print(Text(more, "dim"), indent=2)

    def _difference(self, one: Difference) -> None:
        line = Text(f"{formatting.printable(one.place)}  ", "bold").append_text(
            _change(one.before, one.after)
        )
        if passing := report_text.delivery_change(one):
            line.append(f", {passing}")
        self._print(line.append(f"  {formatting.printable(one.detail_type, 60)}"), indent=2)
        rules = dict.fromkeys(
            [formatting.printable(one.rule_before, 40), formatting.printable(one.rule_after, 40)]
        )
        parts = [formatting.printable(one.id, 40), f"rule {', then '.join(rules)}"]
        parts += [f"same as {formatting.printable(one.same_as)}"] if one.same_as else []
        self._print(Text("; ".join(filter(None, parts)), "dim"), indent=4)

    def _suggestion(self, suggestion: Suggestion) -> None:
        self._head("Suggested configuration")
        for reason in suggestion.reasons:
            self._print(Text(f"• {reason}"), indent=2, hang=2)
        self._print()
        for line in suggestion.toml.splitlines():
            style = "dim" if line.startswith("#") else "green"
            # Without line breaks, so that it can be copied.
            self._console.print(Text(f"  {line}".rstrip(), style), soft_wrap=True)

    # --- pieces ---------------------------------------------------------------------------

    def _head(self, title: str) -> None:
        self._print()
        self._print(Text(title, "bold underline"))

    def _print(self, what: Text | None = None, *, indent: int = 0, hang: int = 0) -> None:
        """Print a paragraph; a number and its unit stay on one line."""
        text = (what or Text()).copy()
        text.plain = text.plain.replace(formatting.NB, _GLUE)
        width = max(self._console.width - indent - hang, 20)
        for at, line in enumerate(text.wrap(self._console, width)):
            line.plain = line.plain.replace(_GLUE, " ")
            line.rstrip()
            begin = Text(" " * (indent + (hang if at else 0)))
            self._console.print(begin.append_text(line) if line.plain else line, soft_wrap=True)


def _bar(number: int, whole: int, *, style: str = "yellow") -> Text:
    """Draw a share; any share above 0 is visible."""
    eighths = max(round(8 * _BAR * number / whole), 1 if number else 0) if whole else 0
    full, rest = divmod(eighths, 8)
    return Text("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else ""), style)


def _change(before: Verdict, after: Verdict) -> Text:
    text = Text(before.value, STYLES.get(before, ""))
    return text.append(" → ", "dim").append(after.value, STYLES.get(after, ""))
