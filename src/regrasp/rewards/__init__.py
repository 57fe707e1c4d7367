"""Rewards read off videos: a vision-language model judges episodes, and its scores become outcomes and rewards."""
