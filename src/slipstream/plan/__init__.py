"""What speculation would give, before anybody trains or serves anything: `slipstream plan`."""
