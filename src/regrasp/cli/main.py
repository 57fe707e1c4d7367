"""``regrasp``: find the command, read its settings, run it, and say what it did.

Nothing is imported before it is needed: the help and the tabular stages load neither torch nor lerobot.
"""

import dataclasses
import errno
import gc
import importlib
import os
import sys
import typing
from collections.abc import Sequence
from pathlib import Path

from regrasp.core.errors import ConfigError, RegraspError, listing, nearest

COMMANDS: dict[str, tuple[str, str, str]] = {
    "demos": ("regrasp.recap.collect_stages", "DemosConfig", "record demonstrations of scripted experts"),
    "inspect": ("regrasp.recap.inspect", "InspectConfig", "say what a dataset holds and what is wrong with it"),
    "annotate terminal": ("regrasp.recap.annotate", "TerminalConfig", "a judge's score of each attempt's end, 1 to 5"),
    "annotate dense": ("regrasp.recap.annotate", "DenseConfig", "a judge's score of every half second, 1 to 3"),
    "annotate rubric": ("regrasp.recap.annotate", "RubricConfig", "a judge's points for each step of a rubric"),
    "annotate check": ("regrasp.recap.judge_check", "CheckConfig", "whether a judge can be trusted, by known outcomes"),
    "outcomes": ("regrasp.recap.outcomes_stage", "OutcomesConfig", "outcomes from a judge's scores, by a stated rule"),
    "returns": ("regrasp.recap.returns", "ReturnsConfig", "a return for every frame, from outcomes"),
    "value fit": ("regrasp.recap.value_fit", "ValueFitConfig", "train a value model on returns"),
    "value predict": ("regrasp.recap.value_predict", "ValuePredictConfig", "a value for every frame"),
    "advantages": ("regrasp.recap.advantages", "AdvantagesConfig", "an advantage and a label for every frame"),
    "relabel": ("regrasp.recap.relabel", "RelabelConfig", "new labels from stored values"),
    "policy fit": ("regrasp.recap.policy_fit", "PolicyFitConfig", "train a policy, conditioned on labels or plainly"),
    "progress": ("regrasp.recap.progress", "ProgressConfig", "values or scores as progress, for weighted training"),
    "improve": (
        "regrasp.recap.improve",
        "ImproveConfig",
        "the whole loop, from a recipe; only what changed runs again",
    ),
    "rollout": ("regrasp.recap.collect_stages", "RolloutConfig", "record a policy's own episodes, with outcomes"),
    "evaluate": ("regrasp.recap.collect_stages", "EvaluateConfig", "success and speed of policies, with intervals"),
}
"""Each command's module, its settings and what it does, in the order of the loop."""

_OF_THE_MACHINE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
}
"""Errors of the operating system that the user can mend: no access, no space, no such name, a broken disk."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 2 for a mistake of the user's, 1 for a failure of ours."""
    gc.set_threshold(100_000)  # thousands of episodes are small objects without cycles; searching them cost 6 %
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    if words[:1] == ["--debug"]:
        words = [*words[1:], "--debug"]
    try:
        shown = _help_for(words)
        if shown is not None:
            print(shown)
            return 0
        if words[0] == "--version":
            from regrasp.core.provenance import VERSION

            print(f"regrasp {VERSION}")
            return 0
        return _run(*_command_of(words))
    except RegraspError as error:
        if debug:
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("Interrupted; what was whole is kept, and nothing half-written was left behind.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        words_of_it, code = _last_words(error)
        print(words_of_it, file=sys.stderr)
        return code


def _last_words(error: Exception) -> tuple[str, int]:
    """What is said of an error that no stage foresaw, and the exit code: a full disk, say, is no defect of ours."""
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        where = "A file" if error.filename is None else f"'{error.filename}'"
        mend = "Mend: correct the path or its permissions, or free some space; --debug shows where."
        return f"StorageError: {where} cannot be used ({error.strerror}). {mend}", 2
    return f"InternalError: {type(error).__name__}: {error}. This is a defect of Regrasp; --debug shows where.", 1


def _help_for(words: list[str]) -> str | None:
    """The list of commands, or of a family's such as ``value``, where that is asked for."""
    if not words or words[0] in {"-h", "--help"}:
        return _overview(list(COMMANDS))
    family = [name for name in COMMANDS if name.startswith(f"{words[0]} ")]
    return _overview(family) if family and words[1:2] and words[1] in {"-h", "--help"} else None


def _overview(names: list[str]) -> str:
    width = max(map(len, names))
    rows = [f"  {name:<{width}}  {COMMANDS[name][2]}" for name in names]
    return "\n".join(
        [
            "usage: regrasp COMMAND [OPTIONS]",
            "",
            "Make a robot policy better from its own logged experience.",
            "",
            *rows,
            "",
            "`regrasp COMMAND --help` lists a command's options.",
        ]
    )


def _command_of(words: list[str]) -> tuple[str, list[str]]:
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return name, words[length:]
    family = [name for name in COMMANDS if name.startswith(f"{words[0]} ")]
    if family:
        message = (
            f"`regrasp {words[0]}` needs one of: {listing(n.split(' ')[1] for n in family)}; found "
            f"{listing(words[1:2]) or 'nothing'}."
        )
        raise ConfigError(message)
    message = f"There is no command {words[0]!r}.{nearest(words[0], COMMANDS)} Known are: {listing(COMMANDS, 20)}."
    raise ConfigError(message)


def _run(command: str, words: list[str]) -> int:
    module_name, config_name, _ = COMMANDS[command]
    module = importlib.import_module(module_name)
    config = parse(command, getattr(module, config_name), words)
    result = module.run(config)
    for line in result.lines:
        print(line)
    return getattr(result, "exit_code", 0)


def parse[C](command: str, config_type: type[C], words: list[str]) -> C:
    """Read a command's settings: flags first, then the recipe that ``--config`` names, then the defaults.

    Raises:
        ConfigError: The recipe has a key or a value that the command does not know.
        SystemExit: A flag is wrong (2), or help was asked for (0).
    """
    import tyro

    words = _spell_switches(config_type, words)
    _refuse_repeated(words)
    default = _recipe_defaults(command, config_type, words)
    return typing.cast(C, tyro.cli(config_type, args=words, prog=f"regrasp {command}", default=default))


def _recipe_defaults[C](command: str, config_type: type[C], words: list[str]) -> C | None:
    path = _value_of("--config", words)
    if path is None:
        return None
    import tyro

    from regrasp.recap.recipe import read_recipe
    from regrasp.recap.recipe_settings import settings_of

    section = read_recipe(Path(path)).section(command)
    fields = {field.name: field for field in dataclasses.fields(config_type)}  # type: ignore[arg-type] - a dataclass
    values = settings_of(Path(path), command, section, config_type)
    default = object.__new__(config_type)  # not by its own means: what is required may still be missing
    for name, field in fields.items():
        otherwise = tyro.MISSING if field.default is dataclasses.MISSING else field.default
        object.__setattr__(default, name, values.get(name, otherwise))
    return default


def _spell_switches(config_type: type, words: list[str]) -> list[str]:
    """Let a switch that may also be left as it was (``bool | None``) be given like any other: ``--x`` or ``--no-x``."""
    spelled: dict[str, list[str]] = {}
    for name, kind in typing.get_type_hints(config_type).items():
        if kind == (bool | None):
            flag = name.replace("_", "-")
            spelled |= {f"--{flag}": [f"--{flag}", "True"], f"--no-{flag}": [f"--{flag}", "False"]}
    following = [*words, ""][1:]
    return [
        part
        for word, after in zip(words, following, strict=True)
        for part in ([word] if after in {"True", "False", "None"} else spelled.get(word.replace("_", "-"), [word]))
    ]


def _refuse_repeated(words: list[str]) -> None:
    """Of a flag that is given twice the parser would take the last, and leave out the other's datasets unsaid."""
    flags = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]
    repeated = next((flag for flag in flags if flags.count(flag) > 1), None)
    if repeated is not None:
        message = (
            f"{repeated} is given {flags.count(repeated)} times. Mend: give it once; one that takes several values "
            f"takes them all: {repeated} A B."
        )
        raise ConfigError(message)


def _value_of(flag: str, words: list[str]) -> str | None:
    for place, word in enumerate(words):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
        if word == flag and place + 1 < len(words):
            return words[place + 1]
    return None
