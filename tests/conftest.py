"""What all tests share."""

from hypothesis import settings

# A slow machine is no reason to fail, and a failure comes with what is needed to repeat it.
settings.register_profile("oncebridge", deadline=None, print_blob=True)
settings.load_profile("oncebridge")
