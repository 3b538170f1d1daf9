"""`python -m compress.cli`."""

import sys

from compress.cli.start import main

sys.exit(main())
