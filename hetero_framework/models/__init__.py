"""Models: cutting them, adapters on them, and the files that they are read from and written to."""

import logging

# bitsandbytes warns at import about an optional kernel package that nothing here uses.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
