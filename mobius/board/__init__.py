"""The page of `mobius board`: runs and plans in a browser, from a small server on this machine."""
