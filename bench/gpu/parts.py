"""The parts of the measurements on GPUs by number (4 is not used), each with its time limit in seconds."""

from bench.gpu import language, options, peers, predictions, training
from bench.gpu.measuring import Part

PARTS = {  # title, time limit, measurements
    1: Part("Ceilings, agreement with the CPU, and training", 520, training.machine_and_training),
    2: Part("Compared with PureJaxRL and brax's trainer", 360, peers.measurements),
    3: Part("XLA's settings, and the share of the limit", 430, options.measurements),
    5: Part("Larger tasks", 560, training.larger_tasks),
    6: Part("A decoder of half a billion parameters", 560, language.measurements),
    7: Part("Predicted and measured", 560, predictions.measurements),
}
