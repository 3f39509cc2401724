"""Training: stages, their schedule, the processes that hold them, and the loop that drives them."""

import logging

# It warns at import about an optional kernel package that nothing here uses.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
