"""Where each Meta-World v3 task reads its objects from, and when it counts as done.

Meta-World computes both inside its reward code, which takes more time than the physics. Each entry states the
same in data; ``tests/test_metaworld_fast.py`` holds every entry against the original.

Source: metaworld 3.0.0, ``metaworld/envs/sawyer_*_v3.py`` (``_get_pos_objects``, ``_get_quat_objects``,
``evaluate_state``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import pi, sqrt
from typing import Literal, Protocol, runtime_checkable

import numpy as np

Vector = tuple[float, float, float]
ORIGIN: Vector = (0.0, 0.0, 0.0)


@runtime_checkable
class Scene(Protocol):
    """What a rule for success may look at, after a step."""

    @property
    def observation(self) -> np.ndarray:
        """The observation, 39 numbers; the first object's position is 4:7."""
        ...

    @property
    def target(self) -> np.ndarray:
        """Where the task wants the object, 3 numbers in metres."""
        ...

    @property
    def fingertips(self) -> np.ndarray:
        """The point between the two fingertips, in metres."""
        ...

    def site(self, name: str) -> np.ndarray:
        """A site's position in metres."""
        ...

    def joint(self, name: str) -> float:
        """A joint's position, in metres or radians."""
        ...

    def original_success(self) -> bool:
        """What Meta-World's own reward code says: right for every task, and slow."""
        ...


Rule = Callable[[Scene], bool]


@dataclass(frozen=True)
class Place:
    """A point of the scene: a body, a site or a geom, with an offset in metres."""

    kind: Literal["body", "site", "geom", "dial"]
    name: str
    offset: Vector = ORIGIN


@dataclass(frozen=True)
class Turn:
    """An object's rotation: a body's quaternion (w first), or made of a matrix (w last), or constant."""

    kind: Literal["body", "geom matrix", "site matrix", "body matrix", "constant"]
    name: str = ""
    constant: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class TaskRules:
    """How one task is observed and judged."""

    places: tuple[Place, ...]
    turns: tuple[Turn, ...]
    success: Rule


def _norm(x: float, y: float, z: float) -> float:
    return sqrt(x * x + y * y + z * z)


def within(radius: float, scale: Vector = (1.0, 1.0, 1.0), offset: Vector = ORIGIN) -> Rule:
    """The first object (moved by ``offset``) is at most ``radius`` metres from the target."""

    def rule(scene: Scene) -> bool:
        obj, target = scene.observation, scene.target
        deltas = [(obj[4 + i] + offset[i] - target[i]) * scale[i] for i in range(3)]
        return _norm(*deltas) <= radius

    return rule


def axis_within(axis: int, distance: float) -> Rule:
    """The first object is at most ``distance`` metres from the target along one axis."""
    return lambda scene: bool(abs(scene.target[axis] - scene.observation[4 + axis]) <= distance)


def fingertips_within(radius: float) -> Rule:
    """The fingertips are at most ``radius`` metres from the target."""
    return lambda scene: _norm(*(scene.fingertips - scene.target)) <= radius


def _basketball(scene: Scene) -> bool:
    obj, target = scene.observation, scene.target
    return _norm(obj[4] - target[0], obj[5] - target[1], (obj[6] - 0.3) * 2.0) <= 0.08


def _nut_on_peg(scene: Scene) -> bool:
    error = scene.target - scene.site("RoundNut")
    return bool(sqrt(error[0] ** 2 + error[1] ** 2) < 0.02 and error[2] > 0.0)


def _lid_on_box(scene: Scene) -> bool:
    return _norm(*(scene.observation[4:7] - scene.target)) < 0.08


def _nut_off_peg(scene: Scene) -> bool:
    return bool(scene.observation[6] > scene.target[2])


def _peg_in_hole(scene: Scene) -> bool:
    return _norm(*((scene.site("pegHead") - scene.target) * np.array([1.0, 2.0, 2.0]))) <= 0.07


def _swept_into(scene: Scene) -> bool:
    obj, target = scene.observation, scene.target
    return _norm(obj[4] - target[0], obj[5] - target[1], 0.0) <= 0.05


def _original(scene: Scene) -> bool:
    return scene.original_success()


def _body(name: str, offset: Vector = ORIGIN) -> tuple[Place, ...]:
    return (Place("body", name, offset),)


def _site(name: str, offset: Vector = ORIGIN) -> tuple[Place, ...]:
    return (Place("site", name, offset),)


def _geom(name: str) -> tuple[Place, ...]:
    return (Place("geom", name),)


def _quaternion(name: str) -> tuple[Turn, ...]:
    return (Turn("body", name),)


def _geom_matrix(name: str) -> tuple[Turn, ...]:
    return (Turn("geom matrix", name),)


NO_TURN = (Turn("constant"),)
BUTTON_TOP = _body("button", (0.0, 0.0, 0.193))
BUTTON_FRONT = _body("button", (0.0, -0.193, 0.0))
PUCK = TaskRules(_body("obj"), _geom_matrix("objGeom"), within(0.07))
PUCK_GEOM = TaskRules(_geom("objGeom"), _geom_matrix("objGeom"), within(0.07))
PLATE = TaskRules(_geom("puck"), _geom_matrix("puck"), within(0.07))
REACH = TaskRules(_body("obj"), _geom_matrix("objGeom"), fingertips_within(0.05))
MUG = TaskRules(_body("obj"), _geom_matrix("mug"), within(0.07))

TASK_RULES: dict[str, TaskRules] = {
    "assembly-v3": TaskRules(_site("RoundNut-8"), _quaternion("RoundNut"), _nut_on_peg),
    "basketball-v3": TaskRules(_body("bsktball"), _quaternion("bsktball"), _basketball),
    "bin-picking-v3": TaskRules(_body("obj"), _quaternion("obj"), within(0.05)),
    "box-close-v3": TaskRules(_body("top_link"), _quaternion("top_link"), _lid_on_box),
    "button-press-topdown-v3": TaskRules(BUTTON_TOP, _quaternion("button"), axis_within(2, 0.024)),
    "button-press-topdown-wall-v3": TaskRules(BUTTON_TOP, _quaternion("button"), axis_within(2, 0.024)),
    "button-press-v3": TaskRules(BUTTON_FRONT, _quaternion("button"), axis_within(1, 0.02)),
    "button-press-wall-v3": TaskRules(BUTTON_FRONT, _quaternion("button"), axis_within(1, 0.03)),
    "coffee-button-v3": TaskRules(
        _site("buttonStart"), (Turn("constant", constant=(1.0, 0.0, 0.0, 0.0)),), axis_within(1, 0.02)
    ),
    "coffee-pull-v3": MUG,
    "coffee-push-v3": MUG,
    "dial-turn-v3": TaskRules((Place("dial", "dial"),), _quaternion("dial"), within(0.07)),
    "disassemble-v3": TaskRules(_site("RoundNut-8"), _quaternion("RoundNut"), _nut_off_peg),
    "door-close-v3": TaskRules(_geom("handle"), _geom_matrix("handle"), within(0.08)),
    "door-lock-v3": TaskRules(_site("lockStartLock"), _quaternion("door_link"), axis_within(2, 0.02)),
    "door-open-v3": TaskRules(_geom("handle"), _geom_matrix("handle"), axis_within(0, 0.08)),
    "door-unlock-v3": TaskRules(_site("lockStartUnlock"), _quaternion("door_link"), axis_within(0, 0.02)),
    "drawer-close-v3": TaskRules(_body("drawer_link", (0.0, -0.16, 0.05)), NO_TURN, within(0.05 + 0.015)),
    "drawer-open-v3": TaskRules(_body("drawer_link", (0.0, -0.16, 0.0)), _quaternion("drawer_link"), within(0.03)),
    "faucet-close-v3": TaskRules(_site("handleStartClose", (0.0, 0.0, -0.01)), _quaternion("faucetBase"), within(0.07)),
    "faucet-open-v3": TaskRules(
        _site("handleStartOpen", (0.0, 0.0, -0.01)),
        _quaternion("faucetBase"),
        within(0.07, offset=(-0.04, 0.0, 0.03)),
    ),
    "hammer-v3": TaskRules(
        (Place("body", "hammer"), Place("body", "nail_link")),
        (Turn("body", "hammer"), Turn("body", "nail_link")),
        lambda scene: scene.joint("NailSlideJoint") > 0.09,
    ),
    "hand-insert-v3": TaskRules(_body("obj"), _quaternion("obj"), within(0.05)),
    "handle-press-side-v3": TaskRules(_site("handleStart"), NO_TURN, axis_within(2, 0.02)),
    "handle-press-v3": TaskRules(_site("handleStart"), NO_TURN, axis_within(2, 0.02)),
    "handle-pull-side-v3": TaskRules(_site("handleCenter"), NO_TURN, within(0.08)),
    "handle-pull-v3": TaskRules(_site("handleRight"), NO_TURN, axis_within(2, 0.05)),
    "lever-pull-v3": TaskRules(
        _site("leverStart"), _geom_matrix("objGeom"), lambda scene: abs(-scene.joint("LeverAxis") - pi / 2) <= pi / 24
    ),
    "peg-insert-side-v3": TaskRules(_site("pegGrasp"), (Turn("site matrix", "pegGrasp"),), _peg_in_hole),
    "peg-unplug-side-v3": TaskRules(_site("pegEnd"), _quaternion("plug1"), within(0.07)),
    "pick-out-of-hole-v3": TaskRules(_body("obj"), _quaternion("obj"), within(0.07)),
    "pick-place-v3": PUCK,
    "pick-place-wall-v3": PUCK_GEOM,
    "plate-slide-back-side-v3": PLATE,
    "plate-slide-back-v3": PLATE,
    "plate-slide-side-v3": PLATE,
    "plate-slide-v3": PLATE,
    "push-back-v3": PUCK_GEOM,
    "push-v3": TaskRules(_body("obj"), _geom_matrix("objGeom"), within(0.05)),
    "push-wall-v3": PUCK_GEOM,
    "reach-v3": REACH,
    "reach-wall-v3": REACH,
    "shelf-place-v3": PUCK,
    "soccer-v3": TaskRules(_body("soccer_ball"), (Turn("body matrix", "soccer_ball"),), within(0.07)),
    "stick-pull-v3": TaskRules(
        (Place("body", "stick"), Place("site", "insertion")),
        (Turn("body matrix", "stick"), Turn("constant")),
        _original,
    ),
    "stick-push-v3": TaskRules(
        (Place("body", "stick"), Place("site", "insertion", (0.0, 0.09, 0.0))),
        (Turn("body matrix", "stick"), Turn("constant")),
        _original,
    ),
    "sweep-into-v3": TaskRules(_body("obj"), _geom_matrix("objGeom"), _swept_into),
    "sweep-v3": TaskRules(_body("obj"), _quaternion("obj"), within(0.05)),
    "window-close-v3": TaskRules(_site("handleCloseStart"), NO_TURN, axis_within(0, 0.05)),
    "window-open-v3": TaskRules(_site("handleOpenStart"), NO_TURN, axis_within(0, 0.05)),
}

SCENE_MOVES_DURING_RESET = frozenset(
    {
        "box-close-v3",
        "disassemble-v3",
        "door-lock-v3",
        "door-unlock-v3",
        "handle-press-side-v3",
        "handle-press-v3",
        "handle-pull-side-v3",
        "handle-pull-v3",
        "peg-unplug-side-v3",
    }
)
"""Tasks in which the objects still move while the hand goes to its start, in a way that depends on where the
episode put them: their resets are simulated in full."""
