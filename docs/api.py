"""The API reference, from the docstrings of the public names: `make docs`."""

import sys
from pathlib import Path

import pdoc

import slipstream

for name in slipstream.__all__:  # they are loaded at first use, and pdoc looks at what is loaded
    setattr(slipstream, name, getattr(slipstream, name))
pdoc.render.configure(show_source=False, footer_text=f"slipstream {slipstream.__version__}")
pdoc.pdoc("slipstream", output_directory=Path(sys.argv[1]))
