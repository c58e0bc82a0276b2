-- Defines :Mlxbc; everything else loads when it is first used.
if vim.g.loaded_mlxbc then
  return
end
vim.g.loaded_mlxbc = true

vim.api.nvim_create_user_command('Mlxbc', function(command)
  require('mlxbc').command(command)
end, {
  nargs = '+',
  range = true,
  desc = 'completion, chat and rewriting by the local mlxbc daemon',
  complete = function(lead, line)
    return require('mlxbc').candidates(lead, line)
  end,
})
