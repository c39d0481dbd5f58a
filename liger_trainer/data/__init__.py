"""Data as users have them, made into the rows that TRL's trainers take.

`files` finds and reads files, `turns` reads conversations with any names of keys and roles, `shapes` recognises which
column holds what and converts the rows, `response_labels` finds the answers in a conversation that a chat template has
written, and `reach` says what of a row a chat template leaves out.
"""
