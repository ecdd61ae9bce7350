"""The program pgqueue."""
