"""Simulated and recorded workers, and the short neutral names by which a conductor knows them."""

from __future__ import annotations

_WORDS = (
    "atlas quill ember cedar onyx fjord maple comet heron basil coral delta flint grove hazel indigo juniper karst "
    "lotus mango nimbus opal pebble quartz raven sable tundra umber violet willow xenon yarrow zephyr acorn birch "
    "cobalt dune elm fern garnet harbor iris jade kelp lark moss nova oak pine reef sage thyme vale wren amber "
    "bramble clover drift echo frost glade haven islet jasper knoll lichen marlin north orchid plume ridge"
)
HANDLES: tuple[str, ...] = tuple(_WORDS.split())
