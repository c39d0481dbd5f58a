"""Rows without padding in place of a padded batch, and each common beginning of sequences once.

1. Lay out (`layout`, on the host, from one copy of ids, mask and labels): the tokens of a packed row, and their order.
2. Run (`packed_row`): the model's own forward, on the tokens of the row with the positions that they had in the batch,
   since at others the rotary embedding would round otherwise. Its mask function asks for the plan of the row
   (`Step.plan_of`). Where no kernel runs, the plan becomes a mask.
3. Scatter (`trainers/fused_forward.py`, `trainers/choose_packing.py`): what a loss needs, to its place in the batch.

A batch of more tokens than `tokens_per_micro_batch` is several packed rows. The loss needs all statistics before any
backward, so all rows but the last are under a checkpoint of forward and head. Processes agree on the number of rows;
where one has fewer, it runs a row of one token without labels (`packing`). `proof` tells which models may, on a small
copy; `trainers/tried_adapters.py` tells which adapters may.
"""
