"""What all tests share: hypothesis has no deadline, since machines that run tests are busy."""

from hypothesis import settings

settings.register_profile("regrasp", deadline=None)
settings.load_profile("regrasp")
