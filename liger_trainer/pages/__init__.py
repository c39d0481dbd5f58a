"""Self-contained HTML pages: one file without scripts, readable from disk, on a phone and in the dark."""

from liger_trainer.pages.document import GENERATOR, page, paragraph, section, table
from liger_trainer.pages.plot import curves

__all__ = ["GENERATOR", "curves", "page", "paragraph", "section", "table"]
