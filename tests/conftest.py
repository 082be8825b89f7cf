"""Settings for all tests: nothing here is measured by the clock, so hypothesis sets no deadline either."""

from hypothesis import settings

settings.register_profile("corral", deadline=None)
settings.load_profile("corral")
