"""Private names of datasets."""

from __future__ import annotations

from liger_trainer.compat.private import Feature, Private

_JSON = "datasets.packaged_modules.json.json"

JSON_TEXT = Feature(
    "text of JSON files that stays text",
    Private(f"{_JSON}:pandas_read_json", parameters="path_or_buf, ..."),
    Private(f"{_JSON}:Json._generate_tables", uses="paj, read_json, ReadOptions, pandas_read_json, json_encode_field"),
    Private("datasets.utils.json:json_encode_field", parameters="example, json_field_path"),
    Private("datasets.utils.json:json_encode_fields_in_json_lines", uses="json_encode_field"),
)
