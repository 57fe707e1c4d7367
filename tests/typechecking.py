"""How the tests check what functions are given and what they return; pyproject.toml names it to jaxtyping."""

from typing import Self

from beartype import BeartypeConf, FrozenDict, beartype

checked = beartype(conf=BeartypeConf(hint_overrides=FrozenDict({Self: object})))
"""beartype. jaxtyping hands it methods one by one, outside their class, where ``Self`` has no meaning to it."""
