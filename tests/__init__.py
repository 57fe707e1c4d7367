"""Tests of Regrasp. They mirror the folders of src/regrasp."""
