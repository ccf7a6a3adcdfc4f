"""Draws graphs and plans as text, Mermaid and SVG; importing this package registers how they print."""

from fdg.drawable import Drawings
from fdg.placing.plans import Plan
from fdg.showing.graph_drawings import graph_mermaid, graph_svg, graph_text
from fdg.showing.plan_mermaid import plan_mermaid
from fdg.showing.plan_svg import plan_svg
from fdg.showing.plan_text import plan_text
from fdg.tracing.graph import FDG

FDG.drawings = Drawings(graph_text, graph_mermaid, graph_svg)
Plan.drawings = Drawings(plan_text, plan_mermaid, plan_svg)
