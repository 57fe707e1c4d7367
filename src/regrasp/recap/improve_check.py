"""What can be known of a recipe before hours are spent on its first stages: its settings, and that sizes fit."""

from typing import TYPE_CHECKING

from regrasp.core.errors import ConfigError, listing
from regrasp.data.dataset import Dataset
from regrasp.recap.selection import open_entry

if TYPE_CHECKING:
    from regrasp.recap.improve_loop import Loop


def check_recipe(loop: "Loop") -> None:
    """Refuse a recipe whose later stages would.

    Raises:
        ConfigError: A setting of any stage is unknown or out of type, the environment is unknown, or a dataset's states
            or actions have another size than the environment's.
    """
    from regrasp.recap.advantages import AdvantagesConfig
    from regrasp.recap.collect_stages import DemosConfig, RolloutConfig
    from regrasp.recap.policy_fit import PolicyFitConfig
    from regrasp.recap.returns import ReturnsConfig
    from regrasp.recap.value_fit import ValueFitConfig
    from regrasp.recap.value_predict import ValuePredictConfig

    recipe = loop.recipe
    loop.settings("demos", recipe.demos or {}, DemosConfig)
    loop.settings("rollout", recipe.rollout, RolloutConfig)
    loop.settings("returns", recipe.returns, ReturnsConfig)
    loop.settings("value fit", recipe.value.fit, ValueFitConfig)
    loop.settings("value predict", recipe.value.predict, ValuePredictConfig)
    loop.settings("advantages", recipe.advantages, AdvantagesConfig)
    policy = loop.settings("policy fit", recipe.policy.fit, PolicyFitConfig)
    if recipe.environment is not None:
        _check_sizes(loop, with_state=policy.get("state", True))


def _check_sizes(loop: "Loop", *, with_state: bool) -> None:
    from regrasp.collect.environments import describe_environment

    assert loop.recipe.environment is not None
    name = loop.recipe.environment.name
    spec = describe_environment(name, max_episode_steps=loop.recipe.environment.max_episode_steps)
    for entry in loop.recipe.train_data_paths:
        dataset = open_entry(entry, loop.path.parent)
        wanted = {dataset.own_column("action"): spec.action_size} | (
            {dataset.state_key: spec.state_size} if with_state else {}
        )
        sizes = {key: (_size(dataset, key), size) for key, size in wanted.items() if key is not None}
        wrong = [f"{key} {found} against {size}" for key, (found, size) in sizes.items() if found not in (None, size)]
        if wrong:
            raise ConfigError(
                f"The recipe '{loop.path}' joins '{dataset.path}' and {name}, which differ in size: {listing(wrong)}. "
                "Mend: use an environment like the one that the data are of, or map other columns with `keys:`."
            )


def _size(dataset: Dataset, column: str) -> int | None:
    shape = dataset.features.get(column, {}).get("shape") or ()
    return int(shape[0]) if len(shape) == 1 else None
