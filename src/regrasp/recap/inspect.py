"""``regrasp inspect``: what datasets hold, and every problem with its mend."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from regrasp.core.errors import ConfigError, RegraspError
from regrasp.data.dataset import open_dataset
from regrasp.data.inspection import examine


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Say what datasets hold and what is wrong with them."""

    datasets: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """The datasets' folders."""
    sidecars: Path | None = None
    """Where the sidecars of read-only datasets are kept."""
    json: bool = False
    """Print JSON for scripts."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class InspectResult:
    """The report, and 2 as exit code where a stage could not use one of the datasets."""

    lines: list[str] = field(default_factory=list)
    exit_code: int = 0


def run(config: InspectConfig) -> InspectResult:
    """Examine every dataset; one that cannot be opened is reported like the others' problems."""
    if not config.datasets:
        message = "No dataset was named. Mend: regrasp inspect DATASET…, the folders that hold meta/ and data/."
        raise ConfigError(message)
    reports = [_examined(path, config.sidecars) for path in config.datasets]
    blocked = any(problem["level"] == "error" for report in reports for problem in report["problems"])
    lines = (
        [json.dumps(reports, indent=2, ensure_ascii=False)]
        if config.json
        else [line for r in reports for line in _page(r)]
    )
    return InspectResult(lines=lines, exit_code=2 if blocked else 0)


def _examined(path: Path, sidecars: Path | None) -> dict[str, Any]:
    try:
        return examine(open_dataset(path, sidecars=sidecars))
    except RegraspError as trouble:
        text, _, mend = str(trouble).rstrip(".").partition(". Mend: ")
        blocks = ["returns", "value fit", "value predict", "advantages", "relabel"]
        problem = {"level": "error", "text": text, "mend": mend or "see the message", "blocks": blocks}
        return {"path": str(path), "problems": [problem]}


def _page(report: dict[str, Any]) -> list[str]:
    lines = [report["path"]]
    if "layout" in report:
        lengths = report["episode_frames"]
        spread = f" ({lengths['least']} to {lengths['most']} an episode, median {lengths['median']})" if lengths else ""
        lines += [
            f"  layout       {report['layout']}, robot {report['robot'] or 'not said'}, {report['fps']:g} frames/s",
            f"  episodes     {report['episodes']}, {report['frames']} frames{spread}",
            f"  state        {report['state'] or 'none'}",
            *_tasks(report["tasks"]),
            *[_camera_line(camera) for camera in report["cameras"]],
            *([] if report["cameras"] else ["  camera       none"]),
            f"  outcomes     {_outcome_line(report['outcomes'])}",
            f"  corrections  {_correction_line(report['corrections'])}",
            *[_sidecar_line(sidecar) for sidecar in report["sidecars"]],
            *([] if report["sidecars"] else ["  sidecar      none"]),
        ]
    for problem in report["problems"]:
        blocked = f" [blocks {', '.join(problem['blocks'])}]" if problem["blocks"] else ""
        lines.append(f"  {problem['level'].upper():8} {problem['text']}{blocked}. Mend: {problem['mend']}.")
    if not report["problems"]:
        lines.append("  no problem found")
    return [*lines, ""]


def _tasks(tasks: dict[str, int]) -> list[str]:
    shown = [f"  task         {task!r}: {count} episodes" for task, count in list(tasks.items())[:10]]
    return shown + ([f"  task         and {len(tasks) - 10} more"] if len(tasks) > 10 else [])


def _camera_line(camera: dict[str, Any]) -> str:
    size = f"{camera['width']}x{camera['height']}" if camera["height"] else "size not said"
    missing = f", MISSING {len(camera['missing'])} files" if camera["missing"] else ", all files there"
    return f"  camera       {camera['name']}: {camera['kind']}, {camera['codec'] or 'codec not said'}, {size}{missing}"


def _outcome_line(outcomes: dict[str, Any]) -> str:
    if not outcomes:
        return "could not be read"
    counts = ", ".join(f"{outcomes[kind]} {kind}" for kind in ("success", "failure", "unknown"))
    return counts + (f" (read from: {', '.join(outcomes['read_from'])})" if outcomes["read_from"] else "")


def _correction_line(corrections: dict[str, Any]) -> str:
    if not corrections:
        return "no column marks any"
    if "frames" not in corrections:
        return f"column {corrections['column']!r} could not be read"
    return f"{corrections['frames']} frames in {corrections['episodes']} episodes (column {corrections['column']!r})"


def _sidecar_line(sidecar: dict[str, Any]) -> str:
    made = f", from {', '.join(f'{k} {v}' for k, v in sidecar['tags'].items())}" if sidecar.get("tags") else ""
    when = f", {sidecar['created']}" if sidecar.get("created") else ""
    return f"  sidecar      {sidecar['kind']} {sidecar['tag']!r}: {sidecar['state']}{when}{made}"
