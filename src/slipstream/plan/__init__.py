"""Forecasts of the speed-up of speculation, before anything is trained or served: `slipstream plan`."""
