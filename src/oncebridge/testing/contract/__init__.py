"""What a store must do, by subject; `StoreContract` is all of it together."""
