"""Models: cutting them, adapters on them, and the files they come from and go to."""

import logging

# It warns at import about an optional kernel package that nothing here uses.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
