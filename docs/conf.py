"""The documentation as a site: `make docs`."""

import adpo

project = "adpo"
author = "The adpo authors"
copyright = author
release = version = adpo.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "adpo"
html_copy_source = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True
autoclass_content = "both"
nitpicky = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
