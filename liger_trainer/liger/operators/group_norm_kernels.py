"""The GroupNorm kernels; `group_norm` splits the work into tiles and launches them.

`x` is contiguous (samples, channels, positions). A row is the channels of one group of one sample, which are adjacent
in memory. A row that fits one program is read once into registers, forward and backward. A longer row is read twice, by
several programs: once for its sums, once for the result.

    forward:   moments of chunks of each row  ->  combined by each program that normalises a part of the row
    backward:  sums over positions of dy and dy * x_hat, for each channel  ->  weighted and summed for dx

Summed over the samples, these per-channel sums are also the gradients of weight and bias. Variances are sums of squared
distances from a mean (Welford's running mean in each lane, combined by Chan's formula), never differences of large
sums.

Shapes: x (samples, channels, positions), rows (samples * groups, channels of a group * positions).
"""

from __future__ import annotations

from liger_trainer.kernels.runtime import tl, triton

MAX_CHUNKS = 128
"""Largest number of chunks of a row, whose moments one program combines."""

_MAX_CHUNKS = tl.constexpr(MAX_CHUNKS)


@triton.jit
def _tile_of_row(tile, row, positions, group_channels, CHANNELS: tl.constexpr, POSITIONS: tl.constexpr):
    """The channels of a tile (in the group), its offsets from the start of the tensor, and its mask."""
    position_tiles = tl.cdiv(positions, POSITIONS)
    channel = (tile // position_tiles) * CHANNELS + tl.arange(0, CHANNELS)
    position = (tile % position_tiles) * POSITIONS + tl.arange(0, POSITIONS)
    mask = (channel < group_channels)[:, None] & (position < positions)[None, :]
    return channel, ((row * group_channels + channel) * positions)[:, None] + position[None, :], mask


@triton.jit
def _per_channel(ptr, group, channel, group_channels):
    """One parameter per channel of a group, as a column in fp32."""
    numbers = tl.load(ptr + group * group_channels + channel, mask=channel < group_channels, other=0.0)
    return numbers.to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["num_chunks"])
def moments_kernel(
    x_ptr,
    mean_ptr,
    square_ptr,
    row_size,
    num_chunks,
    chunk_size,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Writes mean and sum of squared distances of one chunk of a row."""
    program = tl.program_id(0).to(tl.int64)
    begin = (program % num_chunks) * chunk_size
    size = tl.minimum(row_size - begin, chunk_size).to(tl.int32)
    x_ptr += (program // num_chunks) * row_size + begin
    mean = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.float32)
    step = 0.0
    for start in tl.range(0, size, BLOCK, num_stages=NUM_STAGES):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < size
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        step += 1.0
        distance = tl.where(mask, x - mean, 0.0)
        mean += distance * (1.0 / step)
        square += distance * (x - mean)
        count += tl.where(mask, 1.0, 0.0)
    whole_mean = tl.sum(count * mean) / size
    tl.store(mean_ptr + program, whole_mean)
    tl.store(square_ptr + program, tl.sum(square + count * (mean - whole_mean) * (mean - whole_mean)))


@triton.jit(do_not_specialize=["row_size", "num_tiles", "splits", "num_chunks", "chunk_size"])
def group_norm_forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    chunk_mean_ptr,
    chunk_square_ptr,
    positions,
    group_channels,
    num_groups,
    row_size,
    num_tiles,
    splits,
    num_chunks,
    chunk_size,
    eps,
    WHOLE: tl.constexpr,
    CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Normalises a whole row, or every splits-th tile of a longer one from the moments of its chunks."""
    program = tl.program_id(0).to(tl.int64)
    row, split = program // splits, (program % splits).to(tl.int32)
    group = row % num_groups
    if not WHOLE:
        chunk = tl.arange(0, _MAX_CHUNKS).to(tl.int64)
        size = tl.minimum(tl.maximum(row_size.to(tl.int64) - chunk * chunk_size, 0), chunk_size).to(tl.float32)
        at = row * num_chunks + chunk
        chunk_mean = tl.load(chunk_mean_ptr + at, mask=chunk < num_chunks, other=0.0)
        chunk_square = tl.load(chunk_square_ptr + at, mask=chunk < num_chunks, other=0.0)
        mean = tl.sum(size * chunk_mean) / row_size
        distance = chunk_mean - mean
        rstd = tl.rsqrt(tl.sum(chunk_square + size * distance * distance) / row_size + eps)
        if split == 0:
            tl.store(mean_ptr + row, mean)
            tl.store(rstd_ptr + row, rstd)
    for tile in tl.range(split, num_tiles, splits, num_stages=NUM_STAGES):
        channel, offsets, mask = _tile_of_row(tile, row, positions, group_channels, CHANNELS, POSITIONS)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if WHOLE:
            mean = tl.sum(x) / row_size
            centred = tl.where(mask, x - mean, 0.0)
            rstd = tl.rsqrt(tl.sum(centred * centred) / row_size + eps)
            tl.store(mean_ptr + row, mean)
            tl.store(rstd_ptr + row, rstd)
        y = (x - mean) * rstd
        if weight_ptr is not None:
            y *= _per_channel(weight_ptr, group, channel, group_channels)
        if bias_ptr is not None:
            y += _per_channel(bias_ptr, group, channel, group_channels)
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_chunks", "chunk_tiles"])
def channel_sums_kernel(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    product_ptr,
    dy_sum_ptr,
    positions,
    group_channels,
    num_groups,
    num_chunks,
    chunk_tiles,
    CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Sums dy * x_hat and dy over a chunk of the positions, for one tile of channels."""
    program = tl.program_id(0).to(tl.int64)
    chunk = (program % num_chunks).to(tl.int32)
    channel_tiles = tl.cdiv(group_channels, CHANNELS)
    channel_tile = ((program // num_chunks) % channel_tiles).to(tl.int32)
    row = program // num_chunks // channel_tiles
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    position_tiles = tl.cdiv(positions, POSITIONS)
    first = chunk * chunk_tiles
    last = tl.minimum(first + chunk_tiles, position_tiles)
    product = tl.zeros((CHANNELS, POSITIONS), tl.float32)
    dy_sum = tl.zeros((CHANNELS, POSITIONS), tl.float32)
    channel = channel_tile * CHANNELS + tl.arange(0, CHANNELS)
    for position_tile in tl.range(first, last, num_stages=NUM_STAGES):
        tile = channel_tile * position_tiles + position_tile
        _, offsets, mask = _tile_of_row(tile, row, positions, group_channels, CHANNELS, POSITIONS)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        product += dy * ((x - mean) * rstd)
        dy_sum += dy
    sample_chunk = row // num_groups * num_chunks + chunk
    out = (sample_chunk * num_groups + row % num_groups) * group_channels + channel
    tl.store(product_ptr + out, tl.sum(product, axis=1), mask=channel < group_channels)
    tl.store(dy_sum_ptr + out, tl.sum(dy_sum, axis=1), mask=channel < group_channels)


@triton.jit(do_not_specialize=["row_size", "num_tiles", "splits", "num_chunks"])
def group_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    product_ptr,
    dy_sum_ptr,
    positions,
    group_channels,
    num_groups,
    row_size,
    num_tiles,
    splits,
    num_chunks,
    WHOLE: tl.constexpr,
    GROUP_CHANNELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Writes dx of a whole row and its channel sums, or from the channel sums dx of every splits-th tile."""
    program = tl.program_id(0).to(tl.int64)
    row, split = program // splits, (program % splits).to(tl.int32)
    group = row % num_groups
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    inverse_size = 1.0 / row_size
    if not WHOLE:
        every = tl.arange(0, GROUP_CHANNELS)
        products = tl.zeros((GROUP_CHANNELS,), tl.float32)
        dy_sums = tl.zeros((GROUP_CHANNELS,), tl.float32)
        for chunk in range(0, num_chunks):
            at = ((row // num_groups * num_chunks + chunk) * num_groups + group) * group_channels + every
            products += tl.load(product_ptr + at, mask=every < group_channels, other=0.0)
            dy_sums += tl.load(dy_sum_ptr + at, mask=every < group_channels, other=0.0)
        if weight_ptr is not None:
            weights = tl.load(weight_ptr + group * group_channels + every, mask=every < group_channels, other=0.0)
            products *= weights.to(tl.float32)
            dy_sums *= weights.to(tl.float32)
        projection = tl.sum(products) * inverse_size
        mean_g = tl.sum(dy_sums) * inverse_size
    for tile in tl.range(split, num_tiles, splits, num_stages=NUM_STAGES):
        channel, offsets, mask = _tile_of_row(tile, row, positions, group_channels, CHANNELS, POSITIONS)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x_hat = (x - mean) * rstd  # not 0 outside of the mask, but dy is
        g = dy
        if weight_ptr is not None:
            g = dy * _per_channel(weight_ptr, group, channel, group_channels)
        if WHOLE:
            if product_ptr is not None:
                out = row * group_channels + channel
                tl.store(product_ptr + out, tl.sum(dy * x_hat, axis=1), mask=channel < group_channels)
                tl.store(dy_sum_ptr + out, tl.sum(dy, axis=1), mask=channel < group_channels)
            projection = tl.sum(g * x_hat) * inverse_size
            mean_g = tl.sum(g) * inverse_size
        if dx_ptr is not None:
            dx = rstd * (g - mean_g - x_hat * projection)
            tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
