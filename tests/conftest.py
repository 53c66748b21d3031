"""Every test runs offline, from any working directory, and may use a small part of the machine."""

import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
