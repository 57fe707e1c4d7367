"""Tests of Regrasp. They mirror the folders of src/regrasp."""

from tests import typechecking as typechecking  # jaxtyping imports `tests` and takes it as an attribute
