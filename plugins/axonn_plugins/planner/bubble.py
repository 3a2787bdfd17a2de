"""A pipeline's waits and messages (000, section 4.2.2, equations 4.6 to 4.11), and the memory its length must find room for.

Times in seconds, for a microbatch through the whole model: t_f forward, t_b backward. G = G_inter·G_data ranks.
"""

from __future__ import annotations

from dataclasses import dataclass


def _at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} = {count!r} is not a count; use an integer of at least 1")


def bubble_time(t_f: float, t_b: float, g_inter: int) -> float:
    """Seconds that every stage is idle in a batch (equation 4.7).

    Raises:
        ValueError: `g_inter` is no count.
    """
    _at_least_one(g_inter=g_inter)
    return (t_f + t_b) * (1 - 1 / g_inter)


def bubble_slope(t_f: float, t_b: float, g_inter: int) -> float:
    """Seconds that one more stage adds to the bubble (equation 4.8): always some, and fewer and fewer."""
    _at_least_one(g_inter=g_inter)
    return (t_f + t_b) / g_inter**2


def microbatches(batch: int, size: int, g_data: int) -> int:
    """Microbatches that each rank computes, those of its share of the batch.

    Args:
        batch: samples of a batch.
        size: of a microbatch.
        g_data: pipelines side by side.

    Raises:
        ValueError: the batch does not divide.
    """
    _at_least_one(batch=batch, size=size, g_data=g_data)
    if batch % (size * g_data):
        raise ValueError(
            f"batch = {batch} does not divide into microbatches of {size} on {g_data} pipelines; use a multiple of {size * g_data}"
        )
    return batch // (size * g_data)


def messages(batch: int, size: int, g_inter: int, ranks: int) -> int:
    """Messages that a stage in the middle sends and receives in a batch: four for each microbatch (equations 4.9 and 4.10).

    Args:
        batch: samples of a batch.
        size: of a microbatch.
        g_inter: stages.
        ranks: G.

    Raises:
        ValueError: the stages do not divide the ranks, or the batch does not divide.
    """
    _at_least_one(g_inter=g_inter, ranks=ranks)
    if ranks % g_inter:
        raise ValueError(f"g_inter = {g_inter} does not divide the {ranks} ranks; use a divisor")
    return 0 if g_inter == 1 else 4 * microbatches(batch, size, ranks // g_inter)


def send_time(batch: int, size: int, g_inter: int, ranks: int, seconds: float) -> float:
    """Seconds that a stage in the middle sends and receives (equation 4.10); they grow in proportion to G_inter (equation 4.11).

    Args:
        batch: samples of a batch.
        size: of a microbatch.
        g_inter: stages.
        ranks: G.
        seconds: of one message.
    """
    return messages(batch, size, g_inter, ranks) * seconds


def batch_time(
    t_f: float, t_b: float, batch: int, size: int, g_inter: int, ranks: int, seconds: float = 0.0
) -> dict[str, float]:
    """The split of a batch's time in its pipeline phase: compute, point-to-point and bubble, none overlapped.

    Args:
        t_f: forward of a microbatch.
        t_b: backward.
        batch: samples of a batch.
        size: of a microbatch.
        g_inter: stages.
        ranks: G.
        seconds: of one message.
    """
    _at_least_one(g_inter=g_inter, ranks=ranks)
    sent = send_time(batch, size, g_inter, ranks, seconds)
    own = microbatches(batch, size, ranks // g_inter) * (t_f + t_b) / g_inter
    return {"compute": own, "point-to-point": sent, "bubble": bubble_time(t_f, t_b, g_inter)}


@dataclass(frozen=True)
class ModelState:
    """Bytes of weights, gradients and optimizer state on a stage's device, activations not counted (section 3.3.2).

    Attributes:
        plain: mixed precision with Adam, 20φ.
        bucketed: with the state in host memory, 4φ + 16·bucket.
    """

    plain: int
    bucketed: int


def model_state(parameters: int, g_inter: int, bucket: int = 16_000_000) -> ModelState:
    """Bytes on a device for a model of so many parameters over `g_inter` stages of one size."""
    _at_least_one(parameters=parameters, g_inter=g_inter, bucket=bucket)
    stage = -(-parameters // g_inter)
    return ModelState(20 * stage, 4 * stage + 16 * bucket)


def least_stages(parameters: int, memory: int, ranks: int, bucket: int | None = None) -> int:
    """The shortest pipeline whose model state fits.

    Args:
        parameters: of the model.
        memory: bytes of a device that are free for it.
        ranks: G, of which the number of stages is a divisor.
        bucket: elements of a bucket of the bucketed optimizer; None: everything is on the device.

    Raises:
        ValueError: none fits.
    """
    _at_least_one(parameters=parameters, ranks=ranks)
    for g_inter in (number for number in range(1, ranks + 1) if ranks % number == 0):
        state = model_state(parameters, g_inter, bucket or 16_000_000)
        if (state.plain if bucket is None else state.bucketed) <= memory:
            return g_inter
    raise ValueError(
        f"{parameters:,} parameters over {ranks} ranks do not fit into {memory:,} bytes each; use more ranks or memory"
    )
