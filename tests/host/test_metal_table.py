"""Apple's classes, methods and constants, with which the simulator's Metal.h is compared."""

import metal_table
import pytest
from simulator import apple_metal
from simulator.errors import BuildError


@pytest.mark.sweep  # downloads wheels
def test_the_table_is_what_the_wheels_say():
    """Written by `scripts/macos/metal_table`."""
    try:
        made = metal_table.table()
    except BuildError as error:
        pytest.skip(f"no wheel to read: {error}")
    assert made == apple_metal.table()
