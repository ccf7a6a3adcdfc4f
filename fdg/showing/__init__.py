"""Graphs and plans as text, Mermaid and SVG."""

from fdg.drawn import Drawings, draw_with
from fdg.placing.plan import Plan
from fdg.showing.graph_drawings import graph_mermaid, graph_svg, graph_text
from fdg.showing.plan_mermaid import plan_mermaid
from fdg.showing.plan_svg import plan_svg
from fdg.showing.plan_text import plan_text
from fdg.tracing.graph import FDG

draw_with(FDG, Drawings(graph_text, graph_mermaid, graph_svg))
draw_with(Plan, Drawings(plan_text, plan_mermaid, plan_svg))
