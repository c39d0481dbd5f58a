"""Data as users have them, made into the rows that TRL's trainers take.

`files` finds and reads files, `turns` reads conversations with any names of keys and roles and says what of them a chat
template leaves out, `shapes` recognises which column holds what and converts the rows, `pictures` puts pictures where
the text marks their places, and `response_labels` finds the answers in a conversation that a chat template has written.
"""
