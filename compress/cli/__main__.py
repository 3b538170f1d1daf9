"""`python -m compress.cli`."""

import sys

from compress.cli.app import main

sys.exit(main())
