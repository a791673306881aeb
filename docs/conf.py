"""Sphinx's settings. The source is what scripts/docs_pages.py wrote: run `make docs`."""

import re
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]

project = "Heedful"
author = "The Heedful authors"
release = re.findall(r'"([^"]+)"', (_ROOT / "heedful" / "_version.py").read_text(encoding="utf-8"))[-1]
extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["extra", "notebooks"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
suppress_warnings = [
    "ref.python",  # an annotation names a class that several modules have
]
highlight_language = "text"  # of indented blocks: commands and their output
python_maximum_signature_line_length = 88
copybutton_exclude = ".linenos, .gp, .go"

pygments_style = "friendly"
pygments_dark_style = "github-dark"

html_theme = "furo"
html_title = "Heedful"
html_extra_path = [str(_ROOT / "build" / "docs" / "extra")]
html_static_path = [str(_ROOT / "docs" / "static")]
html_css_files = ["heedful.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#9a3412", "color-brand-content": "#9a3412"},
    "dark_css_variables": {"color-brand-primary": "#fdba74", "color-brand-content": "#fdba74"},
}
