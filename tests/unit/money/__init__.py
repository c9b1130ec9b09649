"""Tests of money: amounts, scopes and the ledger."""
