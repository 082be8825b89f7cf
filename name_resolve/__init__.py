"""How the processes of a trial find each other and see who is alive; start reading at `base.py`."""
