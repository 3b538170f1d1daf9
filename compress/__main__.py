"""`python -m compress`."""

import sys

from compress.cli.start import main

sys.exit(main())
