"""Set-ups that others published figures of, run with our side and with others."""
