"""Names of settings in other libraries, by which Heedful's settings may be given too."""

from __future__ import annotations

ALIASES: dict[str, str] = {}  # full path of the setting by its foreign name, such as "learning_rate"
