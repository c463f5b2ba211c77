"""The test cases of the store contract, by subject; `StoreContract` combines them."""
