"""`python -m compress`."""

import sys

from compress.cli.app import main

sys.exit(main())
