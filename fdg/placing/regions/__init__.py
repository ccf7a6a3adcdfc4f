"""The opened iteration: inlined calls and loops with fragments of several groups; ordered side effects."""
