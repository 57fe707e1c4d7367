"""Prompt profiles: what a judge is asked, how it sees the cameras, and how it is sampled; one YAML file each."""

from regrasp.rewards.profiles.profile import BUILT_IN, Ask, Profile, fill, read_profile

__all__ = ["BUILT_IN", "Ask", "Profile", "fill", "read_profile"]
