PATIENCE = 300  # seconds until what hangs has failed: beside others, tests take many times what they take alone
