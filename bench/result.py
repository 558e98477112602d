# SPDX-License-Identifier: Apache-2.0
"""Reads the JSON of `megamoe bench` (docs/schema/bench.schema.json), of today and before arms."""


def arms_of(run):
    """One object for each arm, with the fields that it shares with others."""
    shared = {key: value for key, value in run.items() if key not in ("arms", "ratios")}
    return [{**shared, **arm} for arm in run.get("arms", [{}])]
