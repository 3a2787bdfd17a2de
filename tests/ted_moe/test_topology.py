import pytest

from ted_moe.topology import Topology


@pytest.mark.parametrize("world", [1, 2, 4, 6, 8, 12, 24])
@pytest.mark.parametrize("split", [True, False])
def test_groups_partition_the_ranks(world, split):
    for tensor in (size for size in range(1, world + 1) if world % size == 0):
        for expert in (size for size in range(1, world + 1) if world // (tensor if split else 1) % size == 0):
            if not split and max(tensor, expert) % min(tensor, expert):
                continue  # refused
            topology = Topology(world, tensor, expert, split)
            assert topology.expert_tensor * topology.expert * topology.expert_data == world == tensor * topology.data
            sizes = {"tensor": tensor, "data": topology.data, "expert": expert, "expert_data": topology.expert_data}
            sizes["block"] = max(tensor, expert, tensor * expert if split else 1)
            for rank in range(world):
                reached = set(topology.tensor_group(rank)) | set(topology.expert_group(rank))
                assert reached <= set(topology.block_group(rank))
                for name, size in sizes.items():
                    group = getattr(topology, f"{name}_group")(rank)
                    assert len(group) == size and rank in group and group == sorted(group)
                    assert all(getattr(topology, f"{name}_group")(other) == group for other in group)
                both = set(topology.expert_group(rank)) & set(topology.expert_data_group(rank))
                assert both == {rank}
                if split:
                    # The data group is cut into expert groups (equation 7.7).
                    assert set(topology.expert_group(rank)) <= set(topology.data_group(rank))
                    assert topology.expert_data * expert == topology.data


def test_the_figure():
    """Figure 7.3: two experts, four GPUs, tensor 2."""
    assert str(Topology(4, 2, 2)).splitlines() == [
        "4 ranks: tensor 2, data 2; experts over 2, expert data 1",
        "  tensor      {0 1} {2 3}",
        "  data        {0 2} {1 3}",
        "  expert      {0 2} {1 3}",
        "  expert_data {0} {1} {2} {3}",
    ]


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((8, 3), "tensor = 3 does not divide the 8 ranks"),
        ((8, 2, 8), "expert = 8 does not divide.*tensor = 2 leaves 4 of 8.*divisor of 4"),
        ((8, 2, 3, False), "expert = 3 does not divide.*there are 8"),
        ((12, 2, 3, False), "expert = 3 with whole experts would cut groups of tensor = 2"),
        ((0,), "world = 0"),
        ((8, True), "tensor = True"),
        ((8, 2, "2"), "expert = '2'"),
    ],
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(ValueError, match=message):
        Topology(*sizes)
